"""Moments of each request's life, and the operator's line about it when it ends (PT-28).

The stamps are columns of the request table and end with the row; there is no cleanup pass (KM-13).
"""

from __future__ import annotations

import logging

import attrs
import numpy as np

from tokenspeed.plane.messages import FINISH_WORDS, IndexArray
from tokenspeed.plane.plan import ForwardBatch
from tokenspeed.plane.ports import Meter
from tokenspeed.plane.table import RequestTable

log = logging.getLogger("tokenspeed.request")


@attrs.define(eq=False)
class Stamped:
    """Writer: RequestStats. ``rows`` of the latest batch whose requests all have their first token."""

    rows: IndexArray | None = None


@attrs.frozen(kw_only=True, eq=False)
class RequestStats:
    """Writer of the table's stats columns."""

    table: RequestTable
    meter: Meter
    lines: bool = False
    stamped: Stamped = attrs.field(factory=Stamped)

    def submitted(self, rows: tuple[int, ...], *, now_s: float) -> None:
        """Stamped in the funnel; the queue time starts here (KM-11)."""
        self.table.stats.submitted_s[list(rows)] = now_s

    def seated(self, rows: tuple[int, ...], *, now_s: float) -> None:
        """These appear in a dispatched forward; only the first time counts (KM-12)."""
        stats = self.table.stats
        for row in rows:
            if not stats.first_scheduled_s[row]:
                stats.first_scheduled_s[row] = now_s
                self.meter.queued(now_s - float(stats.submitted_s[row]))

    def preempted(self, rows: tuple[int, ...]) -> None:
        if rows:
            self.table.stats.preemptions[list(rows)] += 1
            self.meter.preempted(len(rows))

    def committed(self, batch: ForwardBatch, *, now_s: float) -> None:
        """Stamp first tokens after a commit; batches of the same requests share their `rows` array."""
        rows = batch.rows
        if rows is self.stamped.rows:
            return
        stats = self.table.stats
        first = rows[stats.first_token_s[rows] == 0]
        if len(first):
            has_output = self.table.tokens.known[first] > self.table.identity.prompt_len[first]
            stats.first_token_s[first[np.flatnonzero(has_output)]] = now_s
        else:
            self.stamped.rows = rows

    def ended(self, rows: tuple[int, ...], *, now_s: float) -> None:
        stats = self.table.stats
        for row in rows:
            first = float(stats.first_token_s[row])
            if first:
                self.meter.finished(prefill_s=first - float(stats.first_scheduled_s[row]), decode_s=now_s - first)
        if not self.lines:
            return
        table = self.table
        for row in rows:
            prompt = int(table.identity.prompt_len[row])
            submitted = float(table.stats.submitted_s[row])
            first = float(table.stats.first_token_s[row])
            log.info(
                "%s: %s, %d prompt (%d cached), %d output tokens, first token %s, total %.3f s, preempted %d times",
                table.identity.rid[row],
                FINISH_WORDS[int(table.output.finish[row])] or "aborted",
                prompt,
                int(table.schedule.cached[row]),
                int(table.tokens.known[row]) - prompt,
                f"{first - submitted:.3f} s" if first else "none",
                now_s - submitted,
                int(table.stats.preemptions[row]),
            )
