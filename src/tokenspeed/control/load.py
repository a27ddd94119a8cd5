"""Load of this engine: the gauges shared by reports, metrics and the batch line, and when to report.

The count of active blocks walks the tables of all live requests, so it is taken at most once per
100 ms (KM-20), and anew in rounds in which nothing runs, where it is free (KM-21, KM-22).
"""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import LoadReport
from tokenspeed.plane.ports import Scheduler
from tokenspeed.plane.results import Sizes

ACTIVE_REUSE_S = 0.1
HEARTBEAT_S = 1.0


@attrs.define(eq=False)
class LoadState:
    """Writer: Load. ``active_at_s`` is None when the next reading must be fresh.

    ``read`` is what the latest report says: a snapshot that finds the same hands out that report.
    """

    active: int = 0
    active_at_s: float | None = None
    read: tuple[Sizes, int, int, int] | None = None
    report: LoadReport = attrs.field(factory=LoadReport)
    sent: LoadReport | None = None
    sent_at_s: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class Load:
    heartbeat_s: float = HEARTBEAT_S
    state: LoadState = attrs.field(factory=LoadState)

    def snapshot(self, scheduler: Scheduler, sizes: Sizes, *, now_s: float) -> LoadReport:
        """The engine's load right now; reads the scheduler, changes nothing in it."""
        state, total = self.state, scheduler.num_usable_pages
        read = (sizes, scheduler.empty_lcm_blocks(), self._active(scheduler, sizes, now_s), total)
        if read != state.read:
            resident = total - read[1]
            state.read = read
            state.report = LoadReport(
                running=sizes.running,
                waiting=sizes.waiting + sizes.suspended,
                resident_blocks=resident,
                # A count up to 100 ms old may exceed what is resident by now; the difference is never negative.
                active_blocks=min(resident, read[2]),
                total_blocks=total,
            )
        return state.report

    def due(self, report: LoadReport, *, with_output: bool, now_s: float) -> LoadReport | None:
        """The report to send with this round's message: always with outputs, else when it changed (FW-26..29)."""
        state = self.state
        if not with_output and report == state.sent and now_s - state.sent_at_s < self.heartbeat_s:
            return None
        state.sent, state.sent_at_s = report, now_s
        return report

    def heartbeat(self, *, now_s: float) -> LoadReport | None:
        """The last report again, if a quiet second has passed; nothing has changed since, no round ran."""
        if self.state.sent is None or now_s - self.state.sent_at_s < self.heartbeat_s:
            return None
        self.state.sent_at_s = now_s
        return self.state.sent

    def next_heartbeat_s(self) -> float:
        return self.state.sent_at_s + self.heartbeat_s

    def _active(self, scheduler: Scheduler, sizes: Sizes, now_s: float) -> int:
        state = self.state
        if not sizes.running:
            state.active_at_s = None
            return scheduler.active_lcm_blocks()
        if state.active_at_s is None or now_s - state.active_at_s >= ACTIVE_REUSE_S:
            state.active, state.active_at_s = scheduler.active_lcm_blocks(), now_s
        return state.active
