"""A simulated device whose clock a test moves by hand, with a record of when each job ran."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from tokenspeed.device.backends.simulated import SimulatedBackend, Work, open_simulated_backend


@attrs.define(eq=False)
class DeviceClock:
    """`Clock` that stands until it is moved."""

    at_s: float = 100.0

    def now_s(self) -> float:
        return self.at_s


@attrs.define(eq=False)
class JobLog:
    """(stream, label, begin, end) of every job, in seconds since `origin_s`; safe from any thread."""

    origin_s: float = 0.0
    jobs: list[tuple[str, str, float, float]] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def placed(self, stream: str, label: str, begin_s: float, end_s: float) -> None:
        with self.lock:
            self.jobs.append((stream, label, begin_s - self.origin_s, end_s - self.origin_s))

    def of(self, label: str) -> list[tuple[float, float]]:
        with self.lock:
            return [(begin, end) for _, name, begin, end in self.jobs if name == label]


@attrs.frozen(eq=False)
class HandDevice:
    backend: SimulatedBackend
    work: Work
    clock: DeviceClock
    log: JobLog

    def advance_to(self, since_origin_s: float) -> None:
        """Move the clock and complete what has ended by then."""
        self.clock.at_s = self.log.origin_s + since_origin_s
        self.backend.timer.timeline.fire()

    def advance_to_end(self) -> None:
        """Let the device run through all that is queued."""
        ends = [end for _, _, _, end in self.log.jobs]
        self.advance_to(max([*ends, self.clock.at_s - self.log.origin_s]))

    def advance(self, seconds: float) -> None:
        self.advance_to(self.clock.at_s - self.log.origin_s + seconds)


@contextmanager
def hand_device() -> Iterator[HandDevice]:
    clock, work = DeviceClock(), Work()
    log = JobLog(origin_s=clock.at_s)
    backend = open_simulated_backend(work=work, clock=clock, observer=log)
    try:
        yield HandDevice(backend=backend, work=work, clock=clock, log=log)
    finally:
        backend.close()
