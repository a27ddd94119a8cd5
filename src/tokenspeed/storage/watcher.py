"""Ends storage operations that take too long or are given up, and tries a store that fails again."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator

import attrs

from tokenspeed.plane.ports import Clock
from tokenspeed.storage.jobs import Desk, Job
from tokenspeed.storage.patience import Patience


@attrs.define(eq=False)
class WatchState:
    """Writers: whoever hands in, and the watcher; under its condition.

    Attributes:
        limits: a heap of (time limit, number, operation); those that are over go when their turn comes.
        cancels: operations to be given up.
        trial: a trial call is on its way.
    """

    limits: list[tuple[float, int, Job]] = attrs.field(factory=list["tuple[float, int, Job]"])
    numbers: Iterator[int] = attrs.field(factory=itertools.count)
    cancels: list[Job] = attrs.field(factory=list[Job])
    trial: bool = False
    closing: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Watcher:
    """`run` is the work of the thread ``ts-l3``; the other methods are for any thread, and never wait for a store.

    Attributes:
        try_again: queues a trial call; `tried` is told when it is over.
    """

    desk: Desk
    clock: Clock
    reading: Patience
    writing: Patience
    try_again: Callable[[], None]
    woken: threading.Condition = attrs.field(factory=threading.Condition)
    state: WatchState = attrs.field(factory=WatchState)

    def watch(self, job: Job) -> None:
        with self.woken:
            heapq.heappush(self.state.limits, (job.until_s, next(self.state.numbers), job))
            if self.state.limits[0][2] is job:
                self.woken.notify()

    def give_up(self, job: Job) -> None:
        """The thread ends it, and not the caller: its lock may be held by a copy."""
        with self.woken:
            self.state.cancels.append(job)
            self.woken.notify()

    def look(self) -> None:
        """The store may be down from now on, which sets the time of a trial."""
        with self.woken:
            self.woken.notify()

    def tried(self) -> None:
        with self.woken:
            self.state.trial = False
            self.woken.notify()

    def stop(self) -> None:
        with self.woken:
            self.state.closing = True
            self.woken.notify()

    def run(self) -> None:
        while True:
            with self.woken:
                if self.state.closing:
                    return
                given_up, self.state.cancels = self.state.cancels, []
                expired = self._expired()
                self._try_again()
                if not given_up and not expired:
                    self.woken.wait(self._until_next())
                    continue
            for job in given_up:
                self.desk.end(job, cancelled=True)
            for job in expired:
                if self.desk.end(job, late=True):
                    why = f"a {job.op.verb.value} was not over after its time limit"
                    (self.writing if job.writes else self.reading).failed(why)

    def _expired(self) -> list[Job]:
        now_s, limits = self.clock.now_s(), self.state.limits
        expired: list[Job] = []
        while limits and (limits[0][0] <= now_s or limits[0][2].over):
            job = heapq.heappop(limits)[2]
            if not job.over:
                expired.append(job)
        return expired

    def _until_next(self) -> float | None:
        times = [self.state.limits[0][0]] if self.state.limits else []
        if self.reading.down and not self.state.trial:
            times.append(self.reading.state.retry_at_s)
        return max(0.0, min(times) - self.clock.now_s()) if times else None

    def _try_again(self) -> None:
        """A trial call in place of a request's: nobody waits for it. One at a time."""
        if self.reading.down and not self.reading.waits and not self.state.trial:
            self.state.trial = True
            self.try_again()
