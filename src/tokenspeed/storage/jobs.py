"""Operations in the executor's hands, and the desk where they are handed in and come back.

An operation ends once: when its last part is done, at its time limit, or because it was given up. From its
end on, no worker touches its host blocks: they copy under the operation's lock, and look whether it is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import attrs

from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.results import StorageDone
from tokenspeed.plane.storage import StorageTraffic


@attrs.define(eq=False)
class Job:
    """One QUERY, GET or PUT. Writers: workers and the watcher, under `lock`.

    Attributes:
        namespace: of the weights that were in force when it was handed in.
        until_s: when it ends, done or not.
        outcomes: by key.
        left: parts that are not done.
    """

    op: StorageOp
    namespace: str
    until_s: float
    outcomes: list[bool]
    left: int
    over: bool = False
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    @property
    def writes(self) -> bool:
        return self.op.verb is StorageVerb.PUT

    def name(self, at: int) -> str:
        """Key number `at`, as the store knows it."""
        return f"{self.namespace}/{self.op.keys[at].hex()}"


class Part(NamedTuple):
    """Keys ``begin .. end - 1`` of an operation: what one worker does at once."""

    job: Job
    begin: int
    end: int


@attrs.define(eq=False)
class DeskState:
    """Writer: Desk, under its lock. `open` is by operation id; `keys`: of open reads, and of open writes."""

    open: dict[int, Job] = attrs.field(factory=dict[int, Job])
    keys: list[int] = attrs.field(factory=lambda: [0, 0])
    completed: list[StorageDone] = attrs.field(factory=list[StorageDone])
    cancelled: list[int] = attrs.field(factory=list[int])
    traffic: StorageTraffic = attrs.field(factory=StorageTraffic)
    closed: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Desk:
    """Any thread. `tell` is called at the end of each operation, without a lock.

    Attributes:
        most_reads, most_writes: keys that may be open at once.
    """

    tell: Callable[[], None]
    most_reads: int
    most_writes: int
    changed: threading.Condition = attrs.field(factory=threading.Condition)
    state: DeskState = attrs.field(factory=DeskState)

    def accepts(self, job: Job) -> bool:
        """Take it in; False: there is no room, or the desk is closed. It is open either way, until `end`."""
        with self.changed:
            keys = self.state.keys
            keys[job.writes] += len(job.op.keys)
            self.state.open[job.op.op_id] = job
            return not self.state.closed and keys[job.writes] <= (self.most_writes if job.writes else self.most_reads)

    def of(self, op_id: int) -> Job | None:
        with self.changed:
            return self.state.open.get(op_id)

    def end(self, job: Job, *, cancelled: bool = False, late: bool = False) -> bool:
        """False: it was over already."""
        with job.lock:
            if job.over:
                return False
            job.over = True
        outcomes = tuple(job.outcomes)
        with self.changed:
            state = self.state
            del state.open[job.op.op_id]
            state.keys[job.writes] -= len(outcomes)
            if cancelled:
                state.cancelled.append(job.op.op_id)
            else:
                state.completed.append(StorageDone(op_id=job.op.op_id, outcomes=outcomes))
            self._count(job, outcomes, late=late)
            self.changed.notify_all()
        self.tell()
        return True

    def count(self, **counts: float) -> None:
        """Add to the fields of `StorageTraffic` of these names."""
        with self.changed:
            self._add(counts)

    def take(self) -> tuple[tuple[StorageDone, ...], tuple[int, ...], StorageTraffic]:
        """What ended since the last call, and what was counted."""
        with self.changed:
            state = self.state
            taken = (tuple(state.completed), tuple(state.cancelled), state.traffic)
            state.completed.clear()
            state.cancelled.clear()
            state.traffic = NO_TRAFFIC
            return taken

    @property
    def pressure(self) -> float:
        """Of the writes' room, 0 to 1: reads are bounded by the requests that wait for them."""
        return min(1.0, self.state.keys[True] / self.most_writes)

    def close(self, wait_s: float) -> None:
        """Take no more; end the reads, and the writes when they are done or the time is over."""
        with self.changed:
            self.state.closed = True
            reads = [job for job in self.state.open.values() if not job.writes]
        for job in reads:
            self.end(job)
        with self.changed:
            self.changed.wait_for(lambda: not self.state.open, timeout=wait_s)
            rest = list(self.state.open.values())
        for job in rest:
            self.end(job, late=True)

    def _count(self, job: Job, outcomes: tuple[bool, ...], *, late: bool) -> None:
        good = sum(outcomes)
        counts = {"late": int(late)}
        if job.op.verb is StorageVerb.GET:
            counts |= {"fetched": good, "failed": len(outcomes) - good}
        elif job.writes:
            counts |= {"stored": good, "failed": len(outcomes) - good}
        self._add(counts)

    def _add(self, counts: dict[str, float] | dict[str, int]) -> None:
        had = self.state.traffic
        self.state.traffic = attrs.evolve(had, **{name: getattr(had, name) + more for name, more in counts.items()})


NO_TRAFFIC = StorageTraffic()
