"""A rank's control plane stepped by hand: `Rig` holds an `EventLoop` and the doubles around it."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from tokenspeed.compose.control import ControlContainer
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import AbortRequest, FrontendMessage, GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.plane.plan import ExecutionPlan, ForwardBatch, int32
from tokenspeed.plane.ports import DataPlane
from tokenspeed.plane.results import (
    Accepted,
    ForwardLanded,
    HeadFacts,
    KvEvent,
    Rejected,
    SchedulerEvent,
    Sizes,
    SubmitResult,
)
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.plane.table import NO_SLOT, RequestTable
from tokenspeed.settings.model import SchedulerSettings, Settings
from tokenspeed.testing import HandClock, HandWakeup, RecordingLink, ScriptedPlane, hash_model
from tokenspeed.testing.device import Landed

SPECS = DeviceSpecs(
    backend="none",
    model_name="toy",
    dtype="float32",
    vocab_size=1000,
    max_model_len=256,
    num_pages=65,
    page_tokens=16,
    max_num_seqs=8,
    max_batched_tokens=64,
    eos_token_ids=(0,),
)


def request(rid: str, prompt: list[int] | int, *, max_new: int | None = 4, **changes: object) -> GenerateRequest:
    """A greedy request; `prompt` as ids, or a length of ids 1, 2, 3, …"""
    ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    if "sampling" in changes:
        sampling = attrs.evolve(changes.pop("sampling"), max_new_tokens=max_new)  # type: ignore[type-var]
    return GenerateRequest(rid=rid, input_ids=frozen_tokens(ids), sampling=sampling, **changes)  # type: ignore[arg-type]


@attrs.define(eq=False)
class HandPlane(ScriptedPlane):
    """A `ScriptedPlane` that asks a device handle, forward by forward, when the forward is committed or queued."""

    handle: object = None
    results: dict[int, Landed] = attrs.field(factory=dict)

    def execute(self, plan: ExecutionPlan, dispatch: object) -> object:  # type: ignore[override]
        ticket = super().execute(plan, dispatch)  # type: ignore[arg-type]
        self.results[ticket] = self.handle.execute(plan, dispatch, ())  # type: ignore[attr-defined]
        return ticket

    def commit(self, ticket: object) -> object:  # type: ignore[override]
        self._note("commit")
        if self.held:
            raise InvariantBroken("commit of a held forward would block for ever")
        return self.results.pop(ticket).result()  # type: ignore[call-overload]


@attrs.define(eq=False)
class Rig:
    loop: EventLoop
    link: RecordingLink
    plane: ScriptedPlane
    clock: HandClock
    wakeup: HandWakeup
    specs: DeviceSpecs

    def put(self, *messages: FrontendMessage) -> None:
        self.link.put(*messages)

    def abort(self, *rids: str) -> None:
        self.link.put(AbortRequest(rids=rids))

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.loop.round()

    def settle(self, limit: int = 2000) -> int:
        """Rounds until one makes no progress; returns how many it took."""
        for done in range(limit):
            if not self.loop.round():
                return done + 1
        raise InvariantBroken("the loop does not come to rest", rounds=limit)


def hand_rig(
    *,
    specs: DeviceSpecs = SPECS,
    settings: Settings | None = None,
    overlap: bool = True,
    plane: DataPlane | None = None,
    **parts: object,
) -> Rig:
    """A control plane over `plane` (default: the hash model), every other part real unless handed in."""
    settings = settings or Settings(scheduler=SchedulerSettings(overlap=overlap, chunk_tokens=32, max_waiting=64))
    link, clock, wakeup = RecordingLink(), HandClock(), HandWakeup()
    chosen = plane if plane is not None else HandPlane(handle=hash_model(specs))
    box = ControlContainer(
        settings=settings, specs=specs, plane=chosen, frontend=link, clock=clock, wakeup=wakeup, **parts
    )
    loop = box.loop()
    if isinstance(loop.scheduler, ScriptedScheduler):
        loop.scheduler.table = loop.table
    return Rig(loop=loop, link=link, plane=chosen, clock=clock, wakeup=wakeup, specs=specs)  # type: ignore[arg-type]


@attrs.define(eq=False)
class Spy:
    """Stands in front of a component, notes ``name.method`` of every call in `log`, passes it on."""

    target: object
    name: str
    log: list[str]

    def __getattr__(self, attribute: str) -> object:
        value = getattr(self.target, attribute)
        if not callable(value):
            return value

        def noted(*args: object, **kwargs: object) -> object:
            self.log.append(f"{self.name}.{attribute}")
            return value(*args, **kwargs)

        return noted


def spied(loop: EventLoop, *names: str) -> tuple[EventLoop, list[str]]:
    """The same loop with spies in front of the named fields (default: every component)."""
    quiet = {"depth", "table", "state", "clock"}
    chosen = names or tuple(f.name for f in attrs.fields(EventLoop) if f.name not in quiet)
    log: list[str] = []
    return attrs.evolve(loop, **{name: Spy(getattr(loop, name), name, log) for name in chosen}), log


@attrs.define(eq=False)
class ScriptedScheduler:
    """`Scheduler` that hands out `plans` in order (then empty ones) and remembers what it was told."""

    plans: list[ExecutionPlan] = attrs.field(factory=list)
    verdict: SubmitResult = attrs.field(factory=lambda: Accepted(count=0))
    held: set[int] = attrs.field(factory=set)
    submitted: list[tuple[int, ...]] = attrs.field(factory=list)
    aborted: list[tuple[int, ...]] = attrs.field(factory=list)
    heads: list[HeadFacts] = attrs.field(factory=list)
    tails: list[tuple[SchedulerEvent, ...]] = attrs.field(factory=list)
    on_submit: Callable[[tuple[int, ...]], SubmitResult] | None = None
    clears: list[bool] = attrs.field(factory=list)
    events: list[KvEvent] = attrs.field(factory=list)
    counts: Sizes = attrs.field(factory=Sizes)
    num_usable_pages: int = 64
    table: RequestTable | None = None
    """Set by `hand_rig`, so that a scripted batch's rows get the slots the script names."""

    def submit(self, rows: object) -> SubmitResult:
        self.submitted.append(tuple(rows))  # type: ignore[call-overload]
        verdict = self.on_submit(tuple(rows)) if self.on_submit else self.verdict  # type: ignore[call-overload]
        if not isinstance(verdict, Rejected):
            self.held.update(rows)  # type: ignore[call-overload]
        return verdict

    def holds(self, row: int) -> bool:
        return row in self.held

    def abort(self, rows: object) -> None:
        self.aborted.append(tuple(rows))  # type: ignore[call-overload]

    def next_execution_plan(self) -> ExecutionPlan:
        plan = self.plans.pop(0) if self.plans else ExecutionPlan(round_id=0)
        if plan.batch is not None and self.table is not None:
            for row, slot in zip(plan.batch.rows.tolist(), plan.batch.slots.tolist(), strict=True):
                if self.table.schedule.slot[row] == NO_SLOT:
                    self.table.seat(row, slot)
        return plan

    def advance_head(self, facts: HeadFacts) -> None:
        self.heads.append(facts)

    def advance(self, events: object) -> None:
        self.tails.append(tuple(events))  # type: ignore[call-overload]

    def sizes(self) -> Sizes:
        return self.counts

    def empty_lcm_blocks(self) -> int:
        return self.num_usable_pages

    def active_lcm_blocks(self) -> int:
        return 0

    def available_lcm_blocks(self) -> int:
        return self.num_usable_pages

    def can_clear_cache(self) -> bool:
        return True

    def clear_cache(self) -> bool:
        return self.clears.pop(0) if self.clears else True

    def drain_kv_events(self) -> tuple[KvEvent, ...]:
        drained = tuple(self.events)
        self.events.clear()
        return drained


def one_row_batch(row: int, slot: int, ids: list[int], *, start: int = 0, samples: bool = True) -> ForwardBatch:
    return ForwardBatch(
        rows=int32([row]),
        slots=int32([slot]),
        starts=int32([start]),
        counts=int32([len(ids)]),
        samples=np.array([samples]),
        input_ids=int32(ids),
    )


def landed_rows(tail: tuple[SchedulerEvent, ...]) -> list[int]:
    return [row for event in tail if isinstance(event, ForwardLanded) for row in event.batch.rows.tolist()]
