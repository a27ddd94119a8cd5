"""The scheduler: requests in, one plan a round out. Deterministic: no clock, no randomness, no threads.

Its parts do the work and each owns one state: `Life` (the state machine), `BlockPool` and the prefix
cache (pages), `Residents` (slots and block tables), `WaitingQueue`, `Admission`, `Decoding`, `Prefill`,
`Pressure` (retraction) and `Exits`. This file is the order in which a plan is made and a result taken.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import ExecutionPlan, StorageOp, index_array
from tokenspeed.plane.results import (
    ForwardLanded,
    HeadFacts,
    KvEvent,
    SchedulerEvent,
    Sizes,
    SubmitResult,
    TransferDone,
)
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.admission import Admission
from tokenspeed.scheduler.audit import SchedulerSnapshot, take_snapshot
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.decoding import Decoding
from tokenspeed.scheduler.draft import PlanDraft
from tokenspeed.scheduler.exits import Exits
from tokenspeed.scheduler.host.images import Images
from tokenspeed.scheduler.kept_states import KeptStates
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.prefill import Prefill
from tokenspeed.scheduler.prefix import Landed, PrefixCache
from tokenspeed.scheduler.pressure import Pressure
from tokenspeed.scheduler.remote import Remote, Streams
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.states import Event, Life, State
from tokenspeed.scheduler.storage import Storage
from tokenspeed.scheduler.tier import Tier
from tokenspeed.scheduler.waiting import WaitingQueue

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class RoundState:
    """Writer: PagedScheduler. ``planned`` and ``landed`` count forwards; they land in the order planned."""

    round_id: int = 0
    may_forward: bool = True
    planned: int = 0
    landed: int = 0


@attrs.frozen(kw_only=True, eq=False)
class PagedScheduler:
    """Meets `plane.ports.Scheduler`."""

    config: SchedulerConfig
    table: RequestTable
    life: Life
    pool: Pool
    cache: PrefixCache
    tier: Tier
    images: Images
    residents: Residents
    states: KeptStates
    waiting: WaitingQueue
    admission: Admission
    decoding: Decoding
    prefill: Prefill
    pressure: Pressure
    exits: Exits
    storage: Storage
    remote: Remote
    state: RoundState = attrs.field(factory=RoundState)

    def submit(self, rows: Sequence[int]) -> SubmitResult:
        return self.admission.submit(rows, round_id=self.state.round_id)

    def holds(self, row: int) -> bool:
        return self.life.holds(row)

    def abort(self, rows: Sequence[int]) -> None:
        for row in rows:
            if self.life.holds(row):
                self.exits.end(row)
            else:
                log.debug("abort of row %d, which is not scheduled", row)

    def next_execution_plan(self) -> ExecutionPlan:
        state = self.state
        state.round_id += 1
        draft = PlanDraft(round_id=state.round_id)
        if self.life.passing and self.life.count(State.ENDED):
            self.remote.tell(draft)
            self.exits.drop_all(draft)
        # Before admissions: what needs no fetch may be admitted by this very plan.
        stored = self.storage.plan(round_id=draft.round_id)
        if not state.may_forward:
            return ExecutionPlan(
                round_id=draft.round_id,
                cache=(*self.tier.take_ops(), *stored),
                aborts=tuple(draft.aborts),
                retired=tuple(draft.retired),
            )
        self.waiting.refresh(round_id=draft.round_id)
        self.admission.begin_plan()
        if self.life.passing and self.life.count(State.YIELDING):
            self.pressure.settle(draft)
        # Decodes first: each has its token in every forward, so it never waits for more than one chunk.
        self.decoding.plan(draft)
        while not draft.pressed and (restored := self.admission.readmit_next()) is not None:
            draft.seated.append(restored)
        streams = self.remote.plan(draft)
        self.prefill.plan(draft)
        idle = state.landed == state.planned and not self.tier.open
        if draft.stuck and idle and not draft.chunks and not len(draft.decodes.rows):
            self.pressure.unstick(draft)
        return self._plan(draft, streams, stored)

    def _plan(self, draft: PlanDraft, streams: Streams, stored: tuple[StorageOp, ...]) -> ExecutionPlan:
        """A plan of what the parts have put into the draft."""
        residents, batch = self.residents, draft.batch()
        self.state.planned += batch is not None
        return ExecutionPlan(
            round_id=draft.round_id,
            batch=batch,
            seated=tuple(draft.seated),
            grants=() if batch is None else residents.take_grants(),
            remote_prefill=streams.prefill,
            remote_decode=streams.decode,
            cache=(*self.tier.take_ops(), *stored),
            pages_to_copy=residents.take_copies(),
            pages_to_zero=residents.take_granted(),
            aborts=tuple(draft.aborts),
            retired=tuple(draft.retired),
            preempted=tuple(draft.preempted),
        )

    def advance_head(self, facts: HeadFacts) -> None:
        if facts.acks:
            works = self.tier.acked(facts.acks)
            self.storage.acked(works)
            for row in self.images.settled(works):
                self.exits.restored(row)
            for row in self.life.rows(State.IMAGING):
                if self.images.ready(row):
                    self.life.move(row, Event.STORED)
        if facts.tick is not None:
            self.state.may_forward = facts.tick.forward
            self.storage.advance(facts.tick, round_id=self.state.round_id)

    def advance(self, events: Sequence[SchedulerEvent]) -> None:
        for event in events:
            if isinstance(event, ForwardLanded):
                self._land(event)
            else:
                self._transferred(event)

    def sizes(self) -> Sizes:
        return self.life.sizes()

    @property
    def num_usable_pages(self) -> int:
        return self.pool.usable

    def empty_lcm_blocks(self) -> int:
        return self.pool.empty

    def active_lcm_blocks(self) -> int:
        return self.pool.active

    def available_lcm_blocks(self) -> int:
        return self.pool.empty + self.pool.cached

    def can_clear_cache(self) -> bool:
        return not (self.pool.active or self.tier.open or self.images.held or self.storage.busy)

    def clear_cache(self) -> bool:
        if not self.can_clear_cache():
            return False
        self.storage.clear()
        self.cache.clear()
        return True

    def drain_kv_events(self) -> tuple[KvEvent, ...]:
        return self.cache.drain()

    def snapshot(self) -> SchedulerSnapshot:
        """Who holds what right now, copied; for diagnostics and tests, not for rounds."""
        return take_snapshot(
            self.table,
            self.life,
            self.pool,
            self.cache,
            self.residents,
            self.states,
            self.tier,
            self.images,
            self.storage,
        )

    def _land(self, event: ForwardLanded) -> None:
        batch, schedule, state = event.batch, self.table.schedule, self.state
        if event.accepted is not None:
            raise InvariantBroken("a speculative result for a plan without drafts", rows=len(batch.rows))
        state.landed += 1
        if state.landed > state.planned:
            raise InvariantBroken("more forwards landed than planned", planned=state.planned)
        rows, slots, ends = batch.rows, batch.slots, batch.starts + batch.counts
        by_one = batch.num_tokens == len(rows)
        schedule.landed[rows] = ends
        # Findable from now on: the KV is there. Ends come after, so that a finished request leaves its blocks.
        some_ended = bool(event.finished) or (self.life.passing > 0 and self.life.count(State.FINISHING) > 0)
        for relink in self.cache.publish(Landed(rows, slots, ends, self.residents.tables, by_one, some_ended)):
            self.residents.relink(relink, forward=state.planned)
        self.states.landed(rows, slots, ends)
        self.residents.release_behind(slots, ends)
        self.residents.release_displaced(landed=state.landed)
        for row in event.finished:
            self.exits.end(row)
        if self.life.passing:
            self.exits.landed()
            self.exits.check_drained()

    def _transferred(self, event: TransferDone) -> None:
        if self.remote.transferred(event):
            rows, schedule = index_array([event.row]), self.table.schedule
            slots, ends = index_array(schedule.slot[rows]), schedule.landed[rows]
            landed = Landed(rows, slots, ends, self.residents.tables, by_one=False, some_ended=event.finished)
            for relink in self.cache.publish(landed):
                self.residents.relink(relink, forward=self.state.planned)
            self.residents.release_behind(slots, ends)
            self.residents.release_displaced(landed=self.state.landed)
        self.remote.settle(event)
