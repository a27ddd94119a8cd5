"""When pages run out: who gives way, how, and when its pages are there.

The victim is the latest admitted decode; one that was a victim before is spared while another can
give way, so that two requests never evict each other for ever, and admission keeps its first date, so
that the eldest always gets on (H12, B-21). A victim with a forward in flight yields: it is not
planned any more, and its pages change hands once that forward has landed (SP-54).
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import IndexArray
from tokenspeed.plane.plan import PlanAbort, index_array
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.config import Retraction, SchedulerConfig
from tokenspeed.scheduler.draft import PlanDraft
from tokenspeed.scheduler.exits import Exits
from tokenspeed.scheduler.host.images import Images
from tokenspeed.scheduler.kept_states import KeptStates
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.seniority import Seniority
from tokenspeed.scheduler.states import Event, Life, State
from tokenspeed.scheduler.tier import Tier
from tokenspeed.scheduler.waiting import WaitingQueue


@attrs.frozen(kw_only=True, eq=False)
class Pressure:
    config: SchedulerConfig
    table: RequestTable
    life: Life
    pool: Pool
    residents: Residents
    waiting: WaitingQueue
    seniority: Seniority
    exits: Exits
    states: KeptStates
    tier: Tier
    images: Images

    def settle(self, draft: PlanDraft) -> None:
        """Take the pages of victims whose forwards have landed."""
        for row in self.life.rows(State.YIELDING):
            draft.pressed = True
            # Another one's turn may have ended it.
            if self.life.of(row) is State.YIELDING and not self.life.flying(row):
                self._give_way(row, draft)

    def relieve(self, short: IndexArray, draft: PlanDraft) -> None:
        """Give each of `short` (decodes that lack a block of some group) its blocks as far as possible.

        Those that give way last come first, so that nobody gets a block and is then made a victim.
        Victims give way one after the other until there is enough; once one has to land first, or an
        acknowledgment will set blocks free, the rest wait for those. A row that got nothing is still in
        DECODING and must be planned only if its present blocks suffice.
        """
        draft.pressed = True
        slot_of = self.table.schedule.slot
        for row in sorted(short.tolist(), key=self.seniority.as_victim):
            while self.life.of(row) is State.DECODING:
                slot = int(slot_of[row])
                lacking = self.residents.lacking(slot)
                if self.pool.fits(lacking):
                    self.residents.extend_each([index_array([slot] * count) for count in lacking])
                    break
                if self.life.count(State.YIELDING) or self.tier.holds_alone():
                    break
                self._call_victim(draft)

    def unstick(self, draft: PlanDraft) -> None:
        """Nothing can be planned and nothing is in flight, but prompts lack blocks: the newest gives way."""
        rows = [row for row in draft.stuck if self.life.of(row) is State.PREFILLING]
        if rows:
            self._give_way(max(rows, key=self.seniority.as_victim), draft)

    def _call_victim(self, draft: PlanDraft) -> None:
        """Make one request give way, now or when its forwards have landed."""
        victim = max(self.life.rows(State.DECODING), key=self.seniority.as_victim)
        if self._way(victim, draft) is Retraction.ABORT:
            victim = self._newest()
        if self.life.flying(victim):
            self.life.move(victim, Event.YIELD)
        else:
            self._give_way(victim, draft)

    def _way(self, row: int, draft: PlanDraft) -> Retraction:
        """The first step of the chain that can be taken with `row`."""
        for step in self.config.retraction:
            if step is not Retraction.SNAPSHOT or (row not in draft.seated and self.images.possible(row)):
                return step
        raise InvariantBroken("no way to retract", chain=self.config.retraction)

    def _newest(self) -> int:
        """A capacity abort takes the newest resident, whatever it does (SP-46)."""
        life = self.life
        rows = life.rows(State.DECODING) + life.rows(State.PREFILLING) + life.rows(State.YIELDING)
        return max(rows, key=self.seniority.admitted)

    def _give_way(self, row: int, draft: PlanDraft) -> None:
        draft.pressed = True
        for step in self.config.retraction:
            if step is Retraction.RECOMPUTE:
                self._send_back(row, draft)
                return
            if step is Retraction.ABORT:
                self._abort_for(row, draft)
                return
            # What this plan seats is not on the device yet.
            if row not in draft.seated and self.images.store(row):
                self._suspend(row, draft)
                return
        raise InvariantBroken("no way to retract", chain=self.config.retraction)

    def _suspend(self, row: int, draft: PlanDraft) -> None:
        """Its image is under way, and its pages and slot are free for this very plan (SP-43, SP-45)."""
        self._vacate(row, draft)
        self.life.move(row, Event.SUSPEND)
        self.seniority.note_retracted(row)
        draft.preempted.append(row)

    def _vacate(self, row: int, draft: PlanDraft) -> None:
        if row in draft.seated:
            draft.seated.remove(row)
        slot = int(self.table.schedule.slot[row])
        self.states.vacated(slot)
        self.residents.release_pages(slot)
        self.table.unseat(row)
        self.residents.leave(slot)

    def _send_back(self, row: int, draft: PlanDraft) -> None:
        """To the head of the waiting queue, with its tokens and without pages; its blocks stay findable (SP-47)."""
        self._vacate(row, draft)
        schedule = self.table.schedule
        schedule.scheduled[row] = schedule.landed[row] = 0
        self.life.move(row, Event.RETRACT)
        self.seniority.note_retracted(row)
        self.waiting.give_back(row, round_id=draft.round_id, stamp=self.seniority.admitted(row))
        draft.preempted.append(row)

    def _abort_for(self, row: int, draft: PlanDraft) -> None:
        """`row` cannot be kept in any way: the newest request gives up its pages, which may be another one."""
        newest = self._newest()
        if newest != row and self.life.of(row) is State.YIELDING:
            self.life.move(row, Event.STAY)
        if not self.life.flying(newest):
            self._abort(newest, draft)
        elif self.life.of(newest) is not State.YIELDING:
            self.life.move(newest, Event.YIELD)

    def _abort(self, row: int, draft: PlanDraft) -> None:
        residents = np.count_nonzero(self.residents.state.owner >= 0)
        reason = (
            f"the KV cache is full: {residents} running requests need more than its {self.pool.usable} pages; "
            "the newest request was ended"
        )
        if row in draft.seated:
            draft.seated.remove(row)
        self.exits.end(row)
        self.exits.drop(row, draft)
        draft.aborts.append(PlanAbort(row=row, reason=reason))
