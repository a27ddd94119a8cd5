"""Turn a forward's result into request state, scheduler events and frontend outputs (the commit).

Works on whole batches: appending tokens, testing for ends and building columns cost a few array
operations, not a Python object a request. Never calls the scheduler or a socket.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import (
    BoolArray,
    Finish,
    Int32Array,
    LoadReport,
    OutputBatch,
    Refusal,
    TopLogprobs,
)
from tokenspeed.plane.plan import ForwardBatch, LogprobPlan
from tokenspeed.plane.results import ForwardLanded, ForwardResult
from tokenspeed.plane.table import RequestTable

NO_PLAN = LogprobPlan()
LENGTH = np.int32(Finish.LENGTH)
NAN_STATUS = 500
NAN_TEXT = "the model's output for this request was not a number; the request was ended, others are unaffected"


@attrs.define(eq=False)
class Columns:
    """Writer: Output. The next message under way; `index` finds a request's entry by its row."""

    rids: list[str] = attrs.field(factory=list[str])
    output_ids: list[list[int]] = attrs.field(factory=list[list[int]])
    finished: list[int] = attrs.field(factory=list[int])
    prompt_tokens: list[int] = attrs.field(factory=list[int])
    completion_tokens: list[int] = attrs.field(factory=list[int])
    cached_tokens: list[int] = attrs.field(factory=list[int])
    logprobs: list[list[float]] = attrs.field(factory=list[list[float]])
    top_logprobs: list[list[TopLogprobs]] = attrs.field(factory=list[list[TopLogprobs]])
    prompt_logprobs: list[list[float | None]] = attrs.field(factory=list[list[float | None]])
    prompt_top_logprobs: list[list[TopLogprobs | None]] = attrs.field(factory=list[list[TopLogprobs | None]])
    status: list[int] = attrs.field(factory=list[int])
    messages: list[str] = attrs.field(factory=list[str])
    index: dict[int, int] = attrs.field(factory=dict[int, int])

    def blank(self, rid: str, *, prompt: int, completion: int, cached: int) -> int:
        """One more entry without tokens; returns its place."""
        self.rids.append(rid)
        self.output_ids.append([])
        self.finished.append(0)
        self.prompt_tokens.append(prompt)
        self.completion_tokens.append(completion)
        self.cached_tokens.append(cached)
        for column in (self.logprobs, self.top_logprobs, self.prompt_logprobs, self.prompt_top_logprobs):
            column.append([])
        self.status.append(0)
        self.messages.append("")
        return len(self.rids) - 1

    def message(self, load: LoadReport | None, engine_index: int) -> OutputBatch:
        return OutputBatch(
            rids=self.rids,
            output_ids=self.output_ids,
            finished=self.finished,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
            status=self.status,
            messages=self.messages,
            load=load,
            engine_index=engine_index,
        )


@attrs.define(eq=False)
class OutputState:
    """Writer: Output.

    ``prompt_values`` and ``prompt_tops`` collect log-probabilities of prompts over their chunks, for
    the requests that asked; an entry goes with the request's first token or its end.
    """

    pending: Columns | None = None
    prompt_values: dict[int, list[float | None]] = attrs.field(factory=dict[int, list[float | None]])
    prompt_tops: dict[int, list[TopLogprobs | None]] = attrs.field(factory=dict[int, list[TopLogprobs | None]])


@attrs.frozen(kw_only=True, eq=False)
class Output:
    """Owns the committed token lists (HS-1) and what the client has been told.

    Attributes:
        is_eos: bool ``[vocab]``, True at the model's EOS ids.
    """

    table: RequestTable
    is_eos: BoolArray
    engine_index: int = 0
    state: OutputState = attrs.field(factory=OutputState)

    def logprob_plan(self, batch: ForwardBatch) -> LogprobPlan:
        """Which rows of `batch` must return log-probabilities (OL-4)."""
        identity, rows = self.table.identity, batch.rows
        sampled: tuple[tuple[int, int], ...] = ()
        prompt: tuple[tuple[int, int, int], ...] = ()
        targets: tuple[tuple[int, ...], ...] = ()
        wanted = identity.logprobs[rows]
        if wanted.max(initial=-1) >= 0:
            chosen = np.flatnonzero((wanted >= 0) & batch.samples)
            sampled = tuple(zip(chosen.tolist(), wanted[chosen].tolist(), strict=True))
        start = identity.prompt_from[rows]
        if start.max(initial=-1) >= 0:
            # Logits at position p predict token p + 1; a chunk of `counts` predicts that many positions.
            first = np.maximum(start, batch.starts + 1)
            last = np.minimum(batch.starts + batch.counts + 1, identity.prompt_len[rows])
            # A request that has output was told of its prompt; a recomputation after a retraction is not news.
            untold = self.table.tokens.known[rows] == identity.prompt_len[rows]
            chosen = np.flatnonzero((start >= 0) & (first < last) & untold)
            tops = np.maximum(wanted, 0)
            prompt = tuple(zip(chosen.tolist(), first[chosen].tolist(), tops[chosen].tolist(), strict=True))
            spans = zip(rows[chosen].tolist(), first[chosen].tolist(), last[chosen].tolist(), strict=True)
            targets = tuple(tuple(self.table.tokens_of(row)[low:high].tolist()) for row, low, high in spans)
        if not sampled and not prompt:
            return NO_PLAN
        return LogprobPlan(sampled=sampled, prompt=prompt, prompt_targets=targets)

    def commit(self, batch: ForwardBatch, result: ForwardResult) -> ForwardLanded:
        """Append the tokens of one landed forward, find the ends, collect outputs.

        A row whose request has ended in the meantime is passed over: its result is surplus (OL-7, OL-17).
        """
        table = self.table
        if result.prompt_logprobs:
            self._collect_prompt(batch, result)
        rows, indices = batch.rows, None
        if not batch.samples.all():
            indices = batch.samples.nonzero()[0]
            rows = rows[indices]
        tokens = np.array(result.tokens, dtype=np.int32)
        if len(rows) != len(tokens):
            raise InvariantBroken("one token for each sampled row", rows=len(rows), tokens=len(tokens))
        live = table.output.owned[rows]
        broken: tuple[int, ...] = ()
        if result.nan_rows:
            broken = self._end_broken(batch, result.nan_rows)
            live = table.output.owned[rows]
        if not live.all():
            keep = live.nonzero()[0]
            rows, tokens = rows[keep], tokens[keep]
            indices = keep if indices is None else indices[keep]
        if not len(rows):
            return ForwardLanded(batch=batch, finished=broken)
        produced = self._append(rows, tokens)
        finish = self._ends(rows, tokens, produced)
        self._emit(rows, tokens, produced, finish)
        if result.token_logprobs or self.state.prompt_values:
            places = range(len(rows)) if indices is None else indices.tolist()
            self._add_logprobs(rows.tolist(), list(places), result)
        if not finish.any():
            return ForwardLanded(batch=batch, finished=broken)
        ended = rows[finish != 0]
        table.output.owned[ended] = False
        return ForwardLanded(batch=batch, finished=broken + tuple(ended.tolist()))

    def end(self, rows: tuple[int, ...], finish: Finish, *, status: int = 0, message: str = "") -> tuple[int, ...]:
        """End live requests outside a forward's result; returns those that were still live."""
        ended = []
        for row in rows:
            if not self.table.output.owned[row]:
                continue
            columns = self._pending()
            at = self._entry(columns, row)
            columns.finished[at] = int(finish)
            columns.status[at] = status
            columns.messages[at] = message
            self.table.output.owned[row] = False
            self.table.output.finish[row] = int(finish)
            self.state.prompt_values.pop(row, None)
            self.state.prompt_tops.pop(row, None)
            ended.append(row)
        return tuple(ended)

    def refuse(self, refusals: tuple[Refusal, ...]) -> None:
        """Tell clients that their requests were not accepted; such requests have no row."""
        for refusal in refusals:
            columns = self._pending()
            at = columns.blank(refusal.rid, prompt=0, completion=0, cached=0)
            columns.finished[at] = int(Finish.ABORT)
            columns.status[at] = refusal.status
            columns.messages[at] = refusal.message

    def reject(self, rows: tuple[int, ...], message: str) -> None:
        """End requests whose submission failed with a client error; they leave at once (OL-16)."""
        self.end(rows, Finish.ABORT, status=400, message=message)

    def take(self, load: LoadReport | None) -> OutputBatch | None:
        """The round's one message (OL-12), or None if there is nothing to say."""
        pending = self.state.pending
        if pending is None:
            return None if load is None else Columns().message(load, self.engine_index)
        self.state.pending = None
        return pending.message(load, self.engine_index)

    @property
    def has_output(self) -> bool:
        return self.state.pending is not None

    def _end_broken(self, batch: ForwardBatch, nan_rows: list[int]) -> tuple[int, ...]:
        """End the requests whose logits were not numbers, each alone (OL-6); returns their rows."""
        rows = tuple(batch.rows[nan_rows].tolist())
        return self.end(rows, Finish.ABORT, status=NAN_STATUS, message=NAN_TEXT)

    def _append(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """Write the new tokens behind the known ones; returns output lengths int32 ``[n]``."""
        columns = self.table.tokens
        slots = self.table.schedule.slot[rows]
        if slots.min() < 0:
            raise InvariantBroken("a result for a request without a slot", rows=rows[slots < 0].tolist())
        known = columns.known[rows]
        columns.seated[slots, known] = tokens
        known += 1
        columns.known[rows] = known
        produced: Int32Array = known - self.table.identity.prompt_len[rows]
        return produced

    def _ends(self, rows: Int32Array, tokens: Int32Array, produced: Int32Array) -> Int32Array:
        """`Finish` values int32 ``[n]``; a stop id wins over the length limit."""
        identity = self.table.identity
        finish: Int32Array = (produced >= identity.max_new[rows]) * LENGTH
        stops = self.is_eos[tokens]
        stops &= identity.eos_ends[rows]
        extra = identity.has_extra_stops[rows]
        if extra.any():
            for i in extra.nonzero()[0].tolist():
                stops[i] |= int(tokens[i]) in identity.extra_stops[int(rows[i])]
        if stops.any():
            stops &= produced >= identity.min_new[rows]
            finish[stops] = Finish.STOP
        self.table.output.finish[rows] = finish
        return finish

    def _emit(self, rows: Int32Array, tokens: Int32Array, produced: Int32Array, finish: Int32Array) -> None:
        """Put one entry a row into the pending columns."""
        if self.state.pending is not None:
            self._emit_again(self.state.pending, rows, tokens, produced, finish)
            return
        rid, n, listed = self.table.identity.rid, len(rows), rows.tolist()
        nothing: list[Any] = [[]] * n  # one shared empty list: entries are replaced, never appended to
        self.state.pending = Columns(
            rids=[rid[row] for row in listed],
            output_ids=tokens.reshape(-1, 1).tolist(),
            finished=finish.tolist(),
            prompt_tokens=self.table.identity.prompt_len[rows].tolist(),
            completion_tokens=produced.tolist(),
            cached_tokens=self.table.schedule.cached[rows].tolist(),
            logprobs=nothing,
            top_logprobs=nothing.copy(),
            prompt_logprobs=nothing.copy(),
            prompt_top_logprobs=nothing.copy(),
            status=[0] * n,
            messages=[""] * n,
            index=dict(zip(listed, range(n), strict=True)),
        )

    def _emit_again(
        self, columns: Columns, rows: Int32Array, tokens: Int32Array, produced: Int32Array, finish: Int32Array
    ) -> None:
        """A second commit of the round, or outputs behind refusals: merge into the entries there are."""
        for row, token, length, end in zip(
            rows.tolist(), tokens.tolist(), produced.tolist(), finish.tolist(), strict=True
        ):
            at = self._entry(columns, row)
            columns.output_ids[at] = [*columns.output_ids[at], token]
            columns.completion_tokens[at] = length
            columns.finished[at] = end

    def _add_logprobs(self, rows: list[int], indices: list[int], result: ForwardResult) -> None:
        """Log-probabilities of the rows that asked; `indices` are the rows' places in the batch."""
        columns = self._pending()
        for index, row in zip(indices, rows, strict=True):
            at = columns.index[row]
            if index in result.token_logprobs:
                columns.logprobs[at] = [*columns.logprobs[at], result.token_logprobs[index]]
                if index in result.token_top_logprobs:
                    columns.top_logprobs[at] = [*columns.top_logprobs[at], result.token_top_logprobs[index]]
            if row in self.state.prompt_values:
                columns.prompt_logprobs[at] = self.state.prompt_values.pop(row)
                columns.prompt_top_logprobs[at] = self.state.prompt_tops.pop(row)

    def _collect_prompt(self, batch: ForwardBatch, result: ForwardResult) -> None:
        identity = self.table.identity
        for part in result.prompt_logprobs:
            row = int(batch.rows[part.index])
            if not self.table.output.owned[row]:
                continue
            start = int(identity.prompt_from[row])
            values = self.state.prompt_values.setdefault(row, [None] if start == 0 else [])
            tops = self.state.prompt_tops.setdefault(row, [None] if start == 0 else [])
            if start + len(values) != part.first:
                # A recomputed chunk (after a retraction) repeats positions that are already there.
                skip = start + len(values) - part.first
                if skip < 0:
                    raise InvariantBroken("prompt log-probabilities with a gap", row=row, at=part.first)
                values.extend(part.values[skip:])
                tops.extend(part.top[skip:])
            else:
                values.extend(part.values)
                tops.extend(part.top)

    def _pending(self) -> Columns:
        if self.state.pending is None:
            self.state.pending = Columns()
        return self.state.pending

    def _entry(self, columns: Columns, row: int) -> int:
        at = columns.index.get(row)
        if at is None:
            table = self.table
            prompt = int(table.identity.prompt_len[row])
            at = columns.index[row] = columns.blank(
                table.identity.rid[row],
                prompt=prompt,
                completion=int(table.tokens.known[row]) - prompt,
                cached=int(table.schedule.cached[row]),
            )
        return at
