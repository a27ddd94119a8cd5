"""When jobs of a simulated device begin and end: computed, not measured.

A job begins when the one before it on its stream has ended, when what its stream waits for has
ended, and not before it was submitted; it ends its duration later. All of that is arithmetic on the
device's clock. A host thread that wakes late sees an end late, but moves none.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterator
from typing import Protocol

import attrs

from tokenspeed.device.backends.host_stream import HostEvent
from tokenspeed.errors import DeviceLost
from tokenspeed.plane.ports import Clock

TIMER_THREAD = "ts-device-clock"
NEVER = float("inf")


@attrs.define(eq=False)
class Span:
    """Writer: Timeline, once. Seconds on the device's clock; both are infinite until they are known."""

    begin_s: float = NEVER
    end_s: float = NEVER

    @property
    def known(self) -> bool:
        return self.end_s != NEVER


@attrs.frozen(eq=False)
class SimulatedEvent(HostEvent):
    """A `DeviceEvent` whose moment is computed when its job is submitted."""

    span: Span = attrs.field(factory=Span)


class JobObserver(Protocol):
    """Is told of every job whose times have become known; for figures and tests."""

    def placed(self, stream: str, label: str, begin_s: float, end_s: float) -> None: ...


@attrs.frozen(eq=False)
class NoObserver:
    def placed(self, stream: str, label: str, begin_s: float, end_s: float) -> None:
        return None


@attrs.frozen(kw_only=True, eq=False)
class SimulatedJob:
    """A job that was run for its effects and waits for its place in time.

    Attributes:
        after: events its stream waits for.
        seconds: how long the device works on it.
    """

    stream: str
    label: str
    event: SimulatedEvent
    after: tuple[SimulatedEvent, ...]
    seconds: float
    error: BaseException | None


@attrs.define(eq=False)
class TimelineState:
    """Writer: Timeline, under its lock.

    Attributes:
        free_s: when each stream has ended all that was placed on it.
        due: jobs by their ends, then by order of submission.
        held: submitted while the device was held, in order; None while it runs.
    """

    free_s: dict[str, float] = attrs.field(factory=dict[str, float])
    due: list[tuple[float, int, SimulatedJob]] = attrs.field(factory=list[tuple[float, int, SimulatedJob]])
    numbers: Iterator[int] = attrs.field(factory=itertools.count)
    held: list[SimulatedJob] | None = None
    closed: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Timeline:
    """The simulated device's past and future. Every method is safe from any thread.

    Attributes:
        clock: the device's. Times already computed do not depend on when it is read.
        changed: guards the state; notified when the next end has moved or the end of all has come.
        firing: held while events are completed, so that they complete in the order of their ends.
    """

    clock: Clock
    observer: JobObserver = attrs.field(factory=NoObserver)
    changed: threading.Condition = attrs.field(factory=threading.Condition)
    firing: threading.Lock = attrs.field(factory=threading.Lock)
    state: TimelineState = attrs.field(factory=TimelineState)

    def place(self, job: SimulatedJob) -> None:
        """Give `job` its times; jobs of one stream come in the order of their submission."""
        with self.changed:
            if self.state.held is not None:
                self.state.held.append(job)
                return
            self._place(job)
        self.fire()

    def hold(self) -> None:
        """Let the device begin no further job until `release`; one that has begun goes on."""
        with self.changed:
            if self.state.held is None:
                self.state.held = []

    def release(self) -> None:
        with self.changed:
            held, self.state.held = self.state.held or [], None
            for job in held:
                self._place(job)
        self.fire()

    def fire(self) -> float | None:
        """Complete every job that has ended by now; returns when the next one ends, None if none will."""
        with self.firing:
            with self.changed:
                due, now_s, ended = self.state.due, self.clock.now_s(), []
                while due and (due[0][0] <= now_s or self.state.closed):
                    ended.append(heapq.heappop(due)[2])
                following = due[0][0] if due else None
            for job in ended:
                job.event.complete(job.error, job.seconds)
        return following

    def close(self) -> None:
        """Complete everything: the jobs have run, only their time was still to pass."""
        with self.changed:
            self.state.closed = True
            self.changed.notify_all()
        self.release()

    def _place(self, job: SimulatedJob) -> None:
        state = self.state
        begin_s = max(
            self.clock.now_s(), state.free_s.get(job.stream, 0.0), *(event.span.end_s for event in job.after), 0.0
        )
        job.event.span.begin_s, job.event.span.end_s = begin_s, begin_s + job.seconds
        state.free_s[job.stream] = job.event.span.end_s
        heapq.heappush(state.due, (job.event.span.end_s, next(state.numbers), job))
        self.observer.placed(job.stream, job.label, job.event.span.begin_s, job.event.span.end_s)
        if state.due[0][2] is job:
            self.changed.notify_all()


@attrs.frozen(eq=False)
class DeviceTimer:
    """The thread that completes events at their ends. Blocked until the next end, or until there is one."""

    timeline: Timeline
    thread: threading.Thread

    def close(self, timeout_s: float = 30.0) -> None:
        """Raises: DeviceLost: the thread has not ended after `timeout_s`."""
        self.timeline.close()
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise DeviceLost(f"{TIMER_THREAD} did not end within {timeout_s:g} s")


def open_timer(timeline: Timeline) -> DeviceTimer:
    # A daemon, so that a process that dies without closing is not kept alive by its device.
    thread = threading.Thread(target=_tick, args=(timeline,), name=TIMER_THREAD, daemon=True)
    thread.start()
    return DeviceTimer(timeline, thread)


def _tick(timeline: Timeline) -> None:
    while True:
        following = timeline.fire()
        with timeline.changed:
            if timeline.state.closed:
                return
            due = timeline.state.due
            if (due[0][0] if due else None) == following:
                timeline.changed.wait(None if following is None else max(0.0, following - timeline.clock.now_s()))
