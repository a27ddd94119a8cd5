"""What the engine holds right now, for a person who asks why nothing moves."""

from __future__ import annotations

import logging

import attrs
import msgspec

from tokenspeed.plane.scheduling import Scheduler
from tokenspeed.plane.table import NO_SLOT, RequestTable

log = logging.getLogger("tokenspeed.state")
MOST_ROWS = 256
"""Requests described one by one; of more, the oldest."""


@attrs.define(eq=False)
class Asked:
    """Set by any thread, cleared by the loop."""

    asked: bool = False


@attrs.frozen(kw_only=True, eq=False)
class StateDump:
    """Reads table and scheduler between two rounds; changes nothing.

    Attributes:
        names: of the values of the table's state column.
    """

    table: RequestTable
    scheduler: Scheduler
    names: tuple[str, ...]
    state: Asked = attrs.field(factory=Asked)

    def ask(self) -> None:
        """Any thread; the answer is a line of the log, written at the end of the next round."""
        self.state.asked = True

    @property
    def asked(self) -> bool:
        return self.state.asked

    def write(self, *, in_flight: int, now_s: float) -> None:
        self.state.asked = False
        told = {"in_flight": in_flight, **self.describe(now_s=now_s)}
        log.warning("state: %s", msgspec.json.encode(told).decode())

    def describe(self, *, now_s: float) -> dict[str, object]:
        """Counts, blocks, and each request: ids and numbers only, no token of anybody's."""
        sizes, scheduler = self.scheduler.sizes(), self.scheduler
        total, empty = scheduler.num_usable_pages, scheduler.empty_lcm_blocks()
        active = scheduler.active_lcm_blocks()
        rows = sorted(self.table.by_rid.values(), key=self.table.identity.order.__getitem__)
        return {
            "requests": attrs.asdict(sizes),
            "blocks": {"total": total, "active": active, "cached": total - empty - active, "empty": empty},
            "rows": [self._row(row, now_s) for row in rows[:MOST_ROWS]],
            "rows_left_out": max(0, len(rows) - MOST_ROWS),
        }

    def _row(self, row: int, now_s: float) -> dict[str, object]:
        table = self.table
        identity, schedule, stats = table.identity, table.schedule, table.stats
        prompt, slot = int(identity.prompt_len[row]), int(schedule.slot[row])
        submitted_s = float(stats.submitted_s[row])
        return {
            "rid": identity.rid[row],
            "state": self.names[int(schedule.state[row])],
            "slot": None if slot == NO_SLOT else slot,
            "prompt_tokens": prompt,
            "cached_tokens": int(schedule.cached[row]),
            "scheduled_tokens": int(schedule.scheduled[row]),
            "landed_tokens": int(schedule.landed[row]),
            "output_tokens": int(table.tokens.known[row]) - prompt,
            "max_tokens": int(identity.max_new[row]),
            "preemptions": int(stats.preemptions[row]),
            "age_s": round(now_s - submitted_s, 3) if submitted_s else None,
        }
