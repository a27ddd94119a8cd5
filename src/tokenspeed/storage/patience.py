"""When a store is taken to be down, so that nobody waits for it, and when it is tried again."""

from __future__ import annotations

import logging
import threading

import attrs

from tokenspeed.plane.ports import Clock

log = logging.getLogger(__name__)

FAULTS_IN_A_ROW = 3
RETRY_S = 10.0


@attrs.define(eq=False)
class PatienceState:
    """Writer: Patience, under its lock."""

    faults: int = 0
    retry_at_s: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class Patience:
    """Of one direction; any thread. `what` is for the log."""

    what: str
    clock: Clock
    retry_s: float = RETRY_S
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    state: PatienceState = attrs.field(factory=PatienceState)

    @property
    def down(self) -> bool:
        """Too many calls failed in a row, and none worked since."""
        return self.state.faults >= FAULTS_IN_A_ROW

    @property
    def waits(self) -> bool:
        """It is down, and it is too early to try again."""
        return self.down and self.clock.now_s() < self.state.retry_at_s

    def failed(self, why: object) -> None:
        with self.lock:
            self.state.faults += 1
            self.state.retry_at_s = self.clock.now_s() + self.retry_s
            first = self.state.faults == FAULTS_IN_A_ROW
        if first:
            log.warning("storage: %s fails, and is tried every %g s from now on: %s", self.what, self.retry_s, why)

    def worked(self) -> None:
        with self.lock:
            was_down, self.state.faults = self.down, 0
        if was_down:
            log.warning("storage: %s works again", self.what)
