"""Moments of each request's life, and the operator's line about it when it ends (PT-28).

The stamps are columns of the request table and end with the row; there is no cleanup pass (KM-13).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import numpy as np

from tokenspeed.plane.messages import FINISH_WORDS, IndexArray
from tokenspeed.plane.plan import ForwardBatch
from tokenspeed.plane.ports import Meter
from tokenspeed.plane.table import RequestTable
from tokenspeed.plane.traces import Attribute, NoTracer, SpanValue, TraceEntry, Tracer

log = logging.getLogger("tokenspeed.request")


@attrs.define(eq=False)
class Stamped:
    """Writer: RequestStats.

    Attributes:
        rows: of the latest batch whose requests all have their first token.
        dispatched: of the latest batch that went out.
        chunks: by row, when each forward with prompt tokens of it landed, and how many they were; kept for traces only.
    """

    rows: IndexArray | None = None
    dispatched: IndexArray | None = None
    chunks: dict[int, list[tuple[float, int]]] = attrs.field(factory=dict[int, list[tuple[float, int]]])


@attrs.frozen(kw_only=True, eq=False)
class RequestStats:
    """Writer of the table's stats columns.

    Attributes:
        wall_s: seconds since the epoch at the loop clock's zero, for spans.
    """

    table: RequestTable
    meter: Meter
    lines: bool = False
    tracer: Tracer = attrs.field(factory=NoTracer)
    wall_s: Callable[[], float] = float
    stamped: Stamped = attrs.field(factory=Stamped)

    def submitted(self, rows: tuple[int, ...], *, now_s: float) -> None:
        """Stamped in the funnel; the queue time starts here (KM-11)."""
        self.table.stats.submitted_s[list(rows)] = now_s

    def dispatched(self, batch: ForwardBatch, *, now_s: float) -> None:
        """These requests are in a dispatched forward; only the first time counts (KM-11, KM-12).

        A seat alone is none: blocks may be lacking, or the KV is on its way from another node.
        """
        rows, stats = batch.rows, self.table.stats
        if rows is self.stamped.dispatched:
            return
        self.stamped.dispatched = rows
        for row in rows[stats.first_scheduled_s[rows] == 0].tolist():
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
        if self.tracer.active:
            self._note_chunks(batch, now_s)
        stats = self.table.stats
        first = rows[stats.first_token_s[rows] == 0]
        if len(first):
            has_output = self.table.tokens.known[first] > self.table.identity.prompt_len[first]
            stats.first_token_s[first[np.flatnonzero(has_output)]] = now_s
        else:
            self.stamped.rows = rows

    def ended(self, rows: tuple[int, ...], *, now_s: float) -> None:
        stats = self.table.stats
        if self.tracer.active:
            for row in rows:
                self._trace(row, now_s)
        for row in rows:
            first = float(stats.first_token_s[row])
            if first:
                self.meter.finished(prefill_s=first - float(stats.first_scheduled_s[row]), decode_s=now_s - first)
        if not self.lines:
            return
        for row in rows:
            self._line(row, now_s)

    def _line(self, row: int, now_s: float) -> None:
        """What an operator asks of one request; ids and numbers, never its text."""
        table, stats = self.table, self.table.stats
        prompt = int(table.identity.prompt_len[row])
        submitted_s, scheduled_s = float(stats.submitted_s[row]), float(stats.first_scheduled_s[row])
        first_s = float(stats.first_token_s[row])
        fields = {
            "rid": table.identity.rid[row],
            "finish": FINISH_WORDS[int(table.output.finish[row])] or "aborted",
            "prompt_tokens": prompt,
            "cached_tokens": int(table.schedule.cached[row]),
            "output_tokens": int(table.tokens.known[row]) - prompt,
            "queue_s": round((scheduled_s or now_s) - submitted_s, 6),
            "first_token_s": round(first_s - submitted_s, 6) if first_s else None,
            "total_s": round(now_s - submitted_s, 6),
            "preemptions": int(stats.preemptions[row]),
        }
        log.info(
            "%s: %s, %d prompt (%d cached), %d output tokens, first token %s, total %.3f s, preempted %d times",
            fields["rid"],
            fields["finish"],
            prompt,
            fields["cached_tokens"],
            fields["output_tokens"],
            f"{fields['first_token_s']:.3f} s" if first_s else "none",
            fields["total_s"],
            fields["preemptions"],
            extra={"fields": fields},
        )

    def _note_chunks(self, batch: ForwardBatch, now_s: float) -> None:
        """Rows without a first token yet have computed a part of their prompt."""
        first = self.table.stats.first_token_s[batch.rows] == 0
        for row, count in zip(batch.rows[first].tolist(), batch.counts[first].tolist(), strict=True):
            self.stamped.chunks.setdefault(row, []).append((now_s, count))

    def _trace(self, row: int, now_s: float) -> None:
        """Queue, prefill with its chunks, and decode, within one span for the engine's part."""
        chunks = self.stamped.chunks.pop(row, [])
        identity, stats = self.table.identity, self.table.stats
        rid, trace = identity.rid[row], identity.trace[row]
        begun = self.tracer.begin(rid, trace)
        if begun is None:
            return
        zero_s = self.wall_s()
        spans: list[SpanValue] = []

        def note(name: str, start_s: float, end_s: float, parent: int, **attributes: Attribute) -> None:
            named = tuple((f"tokenspeed.{key}", value) for key, value in attributes.items())
            spans.append(
                SpanValue(name=name, start_s=zero_s + start_s, end_s=zero_s + end_s, parent=parent, attributes=named)
            )

        submitted_s, scheduled_s = float(stats.submitted_s[row]), float(stats.first_scheduled_s[row])
        first_s, prompt = float(stats.first_token_s[row]), int(identity.prompt_len[row])
        note(
            "engine",
            submitted_s,
            now_s,
            -1,
            prompt_tokens=prompt,
            output_tokens=int(self.table.tokens.known[row]) - prompt,
            cached_tokens=int(self.table.schedule.cached[row]),
            preemptions=int(stats.preemptions[row]),
            finish_reason=FINISH_WORDS[int(self.table.output.finish[row])] or "abort",
        )
        note("queue", submitted_s, scheduled_s or now_s, 0)
        if scheduled_s:
            note("prefill", scheduled_s, first_s or now_s, 0)
            prefill, began_s = len(spans) - 1, scheduled_s
            for landed_s, count in chunks:
                note("prefill chunk", began_s, landed_s, prefill, tokens=count)
                began_s = landed_s
        if first_s:
            note("decode", first_s, now_s, 0)
        self.tracer.add(TraceEntry(rid=rid, span_id=begun.span_id, spans=tuple(spans), trace=trace))
