"""The signal an idle control thread blocks on, and the clocks it reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs

from tokenspeed.plane.ports import Clock


@attrs.frozen(eq=False)
class ThreadWakeup:
    """`plane.ports.Wakeup` over one `threading.Event`; any thread may set it, one thread waits."""

    event: threading.Event = attrs.field(factory=threading.Event)

    def set(self) -> None:
        self.event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Clears the signal *before* returning, so that an arrival during the next round sets it anew."""
        woken = self.event.wait(timeout_s)
        self.event.clear()
        return woken


@attrs.frozen(eq=False)
class MonotonicClock:
    """Seconds since an unspecified start, from the operating system."""

    def now_s(self) -> float:
        return time.monotonic()


def wall_of(clock: Clock) -> Callable[[], float]:
    """Seconds since the epoch at `clock`'s zero, anew at each call: the wall clock may be set meanwhile."""
    return lambda: time.time() - clock.now_s()
