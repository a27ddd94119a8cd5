"""What happened in a run, so that one in which nothing happens cannot pass."""

from __future__ import annotations

from collections import Counter

import attrs
from scheduler_rig import Rig

from tokenspeed.plane.plan import (
    ExecutionPlan,
    LoadBackOp,
    RestoreOp,
    SnapshotOp,
    WriteBackOp,
)
from tokenspeed.plane.results import BlockRemoved
from tokenspeed.scheduler.states import State


@attrs.define(eq=False)
class Seen:
    """Counts over all runs that share it."""

    counts: Counter[str] = attrs.field(factory=Counter)

    def note(self, what: str, times: int = 1) -> None:
        self.counts[what] += times

    def plan(self, rig: Rig, plan: ExecutionPlan) -> None:
        self.note("plans")
        cached = rig.table.schedule.cached
        self.note("hits", sum(bool(cached[row]) for row in plan.seated))
        kinds = [spec.kind for spec in rig.config.specs]
        moves = sum(kinds[copy.group] == "state" for copy in plan.pages_to_copy)
        # A hit copies one state for a newcomer; what is beyond that, owners did who moved off.
        self.note("state moves", max(0, moves - len(plan.seated)))
        self.note("boundary copies", len(plan.pages_to_copy) - moves)
        self.note("retirements", len(plan.retired))
        # Requests beyond those of one forward, seated while others' last results are under way.
        self.note("spare seats", rig.scheduler.residents.seated > rig.config.max_num_seqs)
        written = {(part.group, block) for part in plan.pages_to_zero for block in part.blocks}
        written |= {(copy.group, copy.destination) for copy in plan.pages_to_copy}
        self.note("sources given away", sum((copy.group, copy.source) in written for copy in plan.pages_to_copy))
        if plan.batch is None and not rig.scheduler.state.may_forward:
            self.note("frozen plans")
        for row in plan.preempted:
            state = rig.scheduler.life.of(row)
            self.note("recomputes" if state in (State.WAITING, State.PREFILLING, State.DECODING) else "suspensions")
        for abort in plan.aborts:
            self.note("capacity aborts" if "is full" in abort.reason else "remote failures told")
        self._operations(plan)
        self.note("remote prefills", len(plan.remote_prefill))
        self.note("remote decodes", len(plan.remote_decode))

    def _operations(self, plan: ExecutionPlan) -> None:
        ops = plan.device_ops()
        images = any(isinstance(op, SnapshotOp) for op in ops)
        for op in ops:
            if isinstance(op, WriteBackOp):
                ordered = "ordered write-backs of images" if images else "ordered write-backs of evicted"
                self.note(ordered if op.stream_ordered else "ordinary write-backs")
            elif isinstance(op, LoadBackOp):
                self.note("load-backs")
            elif isinstance(op, SnapshotOp):
                self.note("snapshots")
            elif isinstance(op, RestoreOp):
                self.note("restores")
        for stored in plan.storage_ops():
            self.note(f"storage {stored.verb.value}")

    def step(self, rig: Rig) -> None:
        self.note("steps")
        self.note("evicted", sum(len(event.hashes) for event in rig.events if isinstance(event, BlockRemoved)))
        rig.events.clear()
        for state in State:
            if state is not State.FREE and rig.scheduler.life.count(state):
                self.note(f"lived {state.name}")

    def aborted(self, state: State) -> None:
        self.note(f"abort {state.name}")
