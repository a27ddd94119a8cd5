"""From submission to a seat: which requests are taken, and when the head of the queue gets its pages."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tokenspeed.plane.results import Accepted, Rejected, SubmitResult
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.config import Role, SchedulerConfig
from tokenspeed.scheduler.groups import Group
from tokenspeed.scheduler.hits import Hit
from tokenspeed.scheduler.host.images import Images
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.prefix import PrefixCache
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.seniority import Seniority
from tokenspeed.scheduler.states import Event, Life, State
from tokenspeed.scheduler.storage import Storage
from tokenspeed.scheduler.tier import Tier
from tokenspeed.scheduler.waiting import WaitingQueue


@attrs.define(eq=False)
class AdmissionState:
    """Writer: Admission. The request (by its admission number) that did not fit, what was found of it, and what
    must have changed before it is looked at again: more parents that nobody uses, or fewer residents, whose
    promises and margins count as used. ``away``: the same for a suspended request, with the values of then.
    ``leaving``: seated requests that are not in the forward under construction, nor in any later one."""

    order: int = -1
    unused: int = 0
    seated: int = 0
    found: int = 0
    away: tuple[int, int, int] = (-1, 0, 0)
    leaving: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Admission:
    """A request is seated only with all pages of its known tokens promised to it.

    One block for each seated request stays free beyond that, since each may need one in the next rounds. So a
    prefill never runs short, and a newcomer does not push a running request out. A request alone in
    the pool always fits, or was rejected at submission.
    """

    config: SchedulerConfig
    table: RequestTable
    life: Life
    pool: Pool
    cache: PrefixCache
    groups: tuple[Group, ...]
    residents: Residents
    waiting: WaitingQueue
    seniority: Seniority
    tier: Tier
    images: Images
    storage: Storage
    state: AdmissionState = attrs.field(factory=AdmissionState)

    def begin_plan(self) -> None:
        """Before anything is planned: who has nothing left to plan keeps its slot, and gives up its place."""
        life = self.life
        self.state.leaving = life.count(State.DRAINING) + life.count(State.FINISHING) if life.passing else 0

    def submit(self, rows: Sequence[int], *, round_id: int) -> SubmitResult:
        """All of `rows` or none."""
        seen: set[int] = set()
        for row in rows:
            fault = self._fault(row, seen)
            if fault is not None:
                return fault
            seen.add(row)
        for row in rows:
            if not self.storage.takes(row, most=self._reusable(row, int(self.table.tokens.known[row]))):
                self.life.move(row, Event.SUBMIT)
                self.waiting.add(row, round_id=round_id)
        return Accepted(count=len(rows))

    def admit_next(self) -> int | None:
        """Seat the head of the queue, if there is a slot and there are pages; nobody overtakes it."""
        if not self.waiting or not self._has_seat() or self.images.waiting() is not None:
            return None
        row = self.waiting.head()
        if row is None:
            return None
        state, schedule = self.state, self.table.schedule
        known, limit = int(self.table.tokens.known[row]), self._limit(row)
        order, unused = int(self.table.identity.order[row]), self.pool.empty + self.pool.cached
        seated = self.residents.seated
        no_more_room = unused <= state.unused and seated >= state.seated
        if order == state.order and no_more_room and not self.cache.grew(row, tokens=state.found):
            return None
        most = self._reusable(row, known)
        if self.life.count(State.DECODING) and not self.cache.named(row, most=most):
            return None  # its pages get their names in slices, so that no decode is held up
        # Match and allocation look at one state of the index: nothing happens in between.
        hit = self.cache.match(row, most=most)
        cover = min(known + self.config.ahead_tokens, limit)
        fits = self._fits(row, hit, cover, limit)
        if not fits and not seated:
            # Alone it must fit; what it shares may be scattered over parents, which then count as used.
            hit = self.cache.match(row, most=0)
            fits = self._fits(row, hit, cover, limit)
        if not fits:
            state.order, state.unused, state.seated, state.found = order, unused, seated, hit.tokens
            return None
        state.order = -1
        self.waiting.remove(row)
        self.residents.seat(row, hit, self.tier, goal=known, limit=limit, cover=cover)
        self.storage.admitted(row)
        self.life.move(row, Event.ADMIT)
        self.seniority.note_admitted(row)
        schedule.scheduled[row] = schedule.landed[row] = hit.tokens
        schedule.cached[row] = min(hit.tokens, int(self.table.identity.prompt_len[row]) - 1)
        return row

    def readmit_next(self) -> int | None:
        """Seat the suspended request whose turn it is, if its image is complete and it fits (H12); it is restored
        before it is planned. Nobody is admitted before the last of them is back."""
        row = self.images.waiting()
        if row is None or not self._has_seat() or self.life.of(row) is not State.SUSPENDED:
            return None
        order, unused, seated = self.state.away
        now = (int(self.table.identity.order[row]), self.pool.empty + self.pool.cached, self.residents.seated)
        if now[0] == order and now[1] <= unused and now[2] >= seated:
            return None
        known, limit = int(self.table.tokens.known[row]), self._limit(row)
        cover = min(known + self.config.ahead_tokens, limit)
        hit = self.images.hit(row)
        fits = self._fits(row, hit, cover, limit)
        if not fits and not self.residents.seated:
            # Alone it must fit; what it shares may be scattered over parents, which then count as used.
            hit = self.images.hit(row, device=False)
            fits = self._fits(row, hit, cover, limit)
        if not fits:
            self.state.away = now
            return None
        self.state.away = (-1, 0, 0)
        self.images.restore(row, hit, goal=known, limit=limit, cover=cover)
        self.life.move(row, Event.RESTORE)
        return row

    def _has_seat(self) -> bool:
        """A slot, and a place in the forward under construction."""
        seated = self.residents.seated
        return seated < self.config.request_slots and seated - self.state.leaving < self.config.seats

    def _fits(self, row: int, hit: Hit, cover: int, limit: int) -> bool:
        """Whether all its blocks can be promised, with the margin beside them."""
        seated = self.residents.seated
        room = 0
        if seated and self.seniority.was_retracted(row):
            room = min(self.config.resume_headroom_tokens, limit - cover)
        want = []
        for group, found in zip(self.groups, hit.groups, strict=True):
            own = group.new_blocks(cover=group.blocks_for(cover), found=found.end) + len(found.loaded)
            margin = seated + group.blocks_for(room) if group.by_position else 0
            want.append(own + margin)
        return self.pool.fits(want, [found.shared for found in hit.groups])

    def _limit(self, row: int) -> int:
        """Tokens whose KV the request may need: the last one of its output is never an input."""
        identity = self.table.identity
        new = 1 if self.config.role is Role.PREFILL else int(identity.max_new[row])
        return int(identity.prompt_len[row]) + new - 1

    def _reusable(self, row: int, known: int) -> int:
        """Tokens a match may skip: one at least is computed, and all whose logits are wanted."""
        most = known - 1
        first = int(self.table.identity.prompt_from[row])
        if first >= 0:
            # The log-probability of position p comes from the logits of position p - 1.
            most = min(most, max(first - 1, 0))
        return most

    def _fault(self, row: int, seen: set[int]) -> Rejected | None:
        identity = self.table.identity
        if not 0 <= row < self.table.capacity or not identity.rid[row]:
            return Rejected(message=f"row {row} holds no request", field="row")
        rid = identity.rid[row]
        if row in seen or self.life.holds(row):
            return Rejected(message=f"request {rid!r} is already scheduled", field="rid")
        prompt, new = int(identity.prompt_len[row]), int(identity.max_new[row])
        if prompt < 1:
            return Rejected(message=f"request {rid!r}: the prompt has no tokens, at least 1 is needed", field="prompt")
        if new < 1:
            return Rejected(message=f"request {rid!r}: max_tokens is {new}, must be at least 1", field="max_tokens")
        longest = self.config.max_model_len
        if prompt + new > longest:
            text = (
                f"request {rid!r}: {prompt} prompt tokens and max_tokens {new} exceed the {longest} tokens of the model"
            )
            return Rejected(message=text, field="max_tokens" if prompt < longest else "prompt")
        pages = self._parents_alone(self._limit(row))
        if pages > self.pool.usable:
            text = (
                f"request {rid!r}: {prompt} prompt tokens and max_tokens {new} need {pages} KV pages, "
                f"the pool has {self.pool.usable}"
            )
            return Rejected(message=text, field="max_tokens")
        return None

    def _parents_alone(self, tokens: int) -> int:
        """Pages of the pool that a request of `tokens` tokens needs if it is alone there."""
        parents = 0
        for group, spec in zip(self.groups, self.config.specs, strict=True):
            blocks = group.new_blocks(cover=group.blocks_for(tokens), found=0)
            parents += -(-blocks // spec.blocks_per_parent)
        return parents
