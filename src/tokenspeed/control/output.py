"""Turn a forward's result into request state, scheduler events and frontend outputs (the commit).

Works on whole batches: appending tokens, testing for ends and building columns cost a few array
operations, not a Python object a request. Never calls the scheduler or a socket.
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import (
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
NAN_STATUS = 500
NAN_TEXT = "the model's output for this request was not a number; the request was ended, others are unaffected"


@attrs.define(eq=False)
class Columns:
    """Writer: Output. Rows of the next message, by request; `index` finds a request's entry by row."""

    batch: OutputBatch
    index: dict[int, int] = attrs.field(factory=dict[int, int])


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
        eos: int32, the model's EOS ids, sorted.
    """

    table: RequestTable
    eos: Int32Array
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
            chosen = np.flatnonzero((start >= 0) & (first < last))
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
        sampled: Int32Array = np.flatnonzero(batch.samples).astype(np.int32)
        if len(sampled) != len(result.tokens):
            raise InvariantBroken("one token for each sampled row", rows=len(sampled), tokens=len(result.tokens))
        rows = batch.rows[sampled]
        tokens = np.array(result.tokens, dtype=np.int32)
        live = table.output.owned[rows]
        if result.nan_rows:
            broken = np.isin(sampled, result.nan_rows)
            bad = batch.rows[sampled[broken & live]]
            self.end(tuple(bad.tolist()), Finish.ABORT, status=NAN_STATUS, message=NAN_TEXT)
            finished_early = tuple(bad.tolist())
            live = live & ~broken
        else:
            finished_early = ()
        if not live.all():
            keep = np.flatnonzero(live)
            sampled, rows, tokens = sampled[keep], rows[keep], tokens[keep]
        if not len(rows):
            return ForwardLanded(batch=batch, finished=finished_early)
        produced = self._append(rows, tokens)
        finish = self._ends(rows, tokens, produced)
        self._emit(rows, sampled, tokens, produced, finish, result)
        ended = rows[finish != 0]
        table.output.owned[ended] = False
        return ForwardLanded(batch=batch, finished=finished_early + tuple(ended.tolist()))

    def end(self, rows: tuple[int, ...], finish: Finish, *, status: int = 0, message: str = "") -> tuple[int, ...]:
        """End live requests outside a forward's result; returns those that were still live."""
        ended = []
        for row in rows:
            if not self.table.output.owned[row]:
                continue
            at = self._entry(row)
            columns = self._pending().batch
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
            columns = self._pending().batch
            _append_blank(columns, refusal.rid, prompt=0, completion=0, cached=0)
            columns.finished[-1] = int(Finish.ABORT)
            columns.status[-1] = refusal.status
            columns.messages[-1] = refusal.message

    def reject(self, rows: tuple[int, ...], message: str) -> None:
        """End requests whose submission failed with a client error; they leave at once (OL-16)."""
        self.end(rows, Finish.ABORT, status=400, message=message)

    def take(self, load: LoadReport | None) -> OutputBatch | None:
        """The round's one message (OL-12), or None if there is nothing to say."""
        pending = self.state.pending
        if pending is None:
            return None if load is None else attrs.evolve(empty_batch(self.engine_index), load=load)
        self.state.pending = None
        return attrs.evolve(pending.batch, load=load)

    @property
    def has_output(self) -> bool:
        return self.state.pending is not None

    def _append(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """Write the new tokens behind the known ones; returns output lengths int32 ``[n]``."""
        columns, schedule = self.table.tokens, self.table.schedule
        slots = schedule.slot[rows]
        if (slots < 0).any():
            raise InvariantBroken("a result for a request without a slot", rows=rows[slots < 0].tolist())
        at = columns.known[rows]
        columns.seated[slots, at] = tokens
        columns.known[rows] = at + 1
        produced: Int32Array = at + 1 - self.table.identity.prompt_len[rows]
        return produced

    def _ends(self, rows: Int32Array, tokens: Int32Array, produced: Int32Array) -> Int32Array:
        """`Finish` values int32 ``[n]``; a stop id wins over the length limit."""
        identity = self.table.identity
        finish = np.where(produced >= identity.max_new[rows], np.int32(Finish.LENGTH), np.int32(0))
        may_stop = produced >= identity.min_new[rows]
        stops = np.isin(tokens, self.eos) & identity.eos_ends[rows]
        extra = identity.has_extra_stops[rows]
        if extra.any():
            for i in np.flatnonzero(extra).tolist():
                stops[i] |= int(tokens[i]) in identity.extra_stops[int(rows[i])]
        finish[stops & may_stop] = Finish.STOP
        self.table.output.finish[rows] = finish
        return finish

    def _emit(
        self,
        rows: Int32Array,
        indices: Int32Array,
        tokens: Int32Array,
        produced: Int32Array,
        finish: Int32Array,
        result: ForwardResult,
    ) -> None:
        """Put one entry a row into the pending columns; `indices` are the rows' places in the batch."""
        if self.state.pending is None:
            self._emit_fresh(rows, tokens, produced, finish)
        else:
            self._emit_again(rows, tokens, produced, finish)
        if not (result.token_logprobs or self.state.prompt_values):
            return
        batch, entry = self._pending().batch, self._pending().index
        for index, row in zip(indices.tolist(), rows.tolist(), strict=True):
            at = entry[row]
            if index in result.token_logprobs:
                batch.logprobs[at] = [*batch.logprobs[at], result.token_logprobs[index]]
                if index in result.token_top_logprobs:
                    batch.top_logprobs[at] = [*batch.top_logprobs[at], result.token_top_logprobs[index]]
            if row in self.state.prompt_values:
                batch.prompt_logprobs[at] = self.state.prompt_values.pop(row)
                batch.prompt_top_logprobs[at] = self.state.prompt_tops.pop(row)

    def _emit_fresh(self, rows: Int32Array, tokens: Int32Array, produced: Int32Array, finish: Int32Array) -> None:
        rid, n = self.table.identity.rid, len(rows)
        listed = rows.tolist()
        batch = OutputBatch(
            rids=[rid[row] for row in listed],
            output_ids=tokens.reshape(-1, 1).tolist(),
            finished=finish.tolist(),
            prompt_tokens=self.table.identity.prompt_len[rows].tolist(),
            completion_tokens=produced.tolist(),
            cached_tokens=self.table.schedule.cached[rows].tolist(),
            # One shared empty list a column: entries are replaced, never appended to.
            logprobs=[[]] * n,
            top_logprobs=[[]] * n,
            prompt_logprobs=[[]] * n,
            prompt_top_logprobs=[[]] * n,
            status=[0] * n,
            messages=[""] * n,
            engine_index=self.engine_index,
        )
        self.state.pending = Columns(batch=batch, index=dict(zip(listed, range(n), strict=True)))

    def _emit_again(self, rows: Int32Array, tokens: Int32Array, produced: Int32Array, finish: Int32Array) -> None:
        """A second commit of the round, or outputs behind refusals: merge into the entries there are."""
        for row, token, length, end in zip(
            rows.tolist(), tokens.tolist(), produced.tolist(), finish.tolist(), strict=True
        ):
            at = self._entry(row)
            batch = self._pending().batch
            batch.output_ids[at].append(token)
            batch.completion_tokens[at] = length
            batch.finished[at] = end

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
            self.state.pending = Columns(batch=empty_batch(self.engine_index))
        return self.state.pending

    def _entry(self, row: int) -> int:
        pending = self._pending()
        at = pending.index.get(row)
        if at is None:
            table = self.table
            at = pending.index[row] = len(pending.batch.rids)
            prompt = int(table.identity.prompt_len[row])
            _append_blank(
                pending.batch,
                table.identity.rid[row],
                prompt=prompt,
                completion=int(table.tokens.known[row]) - prompt,
                cached=int(table.schedule.cached[row]),
            )
        return at


def empty_batch(engine_index: int) -> OutputBatch:
    """A message with no rows: carries a load report, or collects entries."""
    return OutputBatch(
        rids=[],
        output_ids=[],
        finished=[],
        prompt_tokens=[],
        completion_tokens=[],
        cached_tokens=[],
        logprobs=[],
        top_logprobs=[],
        prompt_logprobs=[],
        prompt_top_logprobs=[],
        status=[],
        messages=[],
        engine_index=engine_index,
    )


def _append_blank(batch: OutputBatch, rid: str, *, prompt: int, completion: int, cached: int) -> None:
    batch.rids.append(rid)
    batch.output_ids.append([])
    batch.finished.append(0)
    batch.prompt_tokens.append(prompt)
    batch.completion_tokens.append(completion)
    batch.cached_tokens.append(cached)
    batch.logprobs.append([])
    batch.top_logprobs.append([])
    batch.prompt_logprobs.append([])
    batch.prompt_top_logprobs.append([])
    batch.status.append(0)
    batch.messages.append("")
