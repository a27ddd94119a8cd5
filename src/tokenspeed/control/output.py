"""Turn a forward's result into request state, scheduler events and frontend outputs (the commit).

Works on whole batches. What stays the same while the same requests decode together is gathered once
(`Cohort`), so that a steady round costs a few array operations and no Python object a request but
the tokens and lengths it sends. Never calls the scheduler or a socket.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.logprobs import NO_LOGPROBS, logprob_plan
from tokenspeed.plane.messages import (
    BoolArray,
    Finish,
    IndexArray,
    Int32Array,
    LoadReport,
    OneToken,
    OutputBatch,
    Refusal,
    TopLogprobs,
)
from tokenspeed.plane.outputs import OutputSink
from tokenspeed.plane.plan import ForwardBatch, LogprobPlan
from tokenspeed.plane.results import ForwardLanded, ForwardResult
from tokenspeed.plane.table import RequestTable

LENGTH = np.int32(Finish.LENGTH)
ONE, ONE_SHORT = np.array(1, dtype=np.int64), np.array(1, dtype=np.int32)  # numpy adds these faster than a Python int
NOBODY: IndexArray = np.zeros(0, dtype=np.int64)
GRAMMAR_TEXT = "a token outside this request's grammar was drawn; the request was ended, others are unaffected"
COSTLY_TEXT = "this request's grammar has too many readings: following it takes longer than grammar.token_ms a token"
NAN_TEXT = (
    "no token could be drawn: the model's output was not a number, or a logits processor failed or left no token; "
    "the request was ended, others are unaffected"
)


@attrs.define(eq=False)
class Cohort:
    """Writer: Output. The live sampled rows of a batch, and what stays the same while the batch comes again.

    Holds while batches carry the same `source` object and no row has taken or left a slot (`moves`);
    Output drops it when one of its rows ends. Messages of all its rounds share the constant columns.

    Attributes:
        source: the batch's `rows` array; None: some of them do not sample, so it serves one commit.
        given: tokens in the result of such a batch.
        keep: int64, places of the live rows (`rows`, int64 ``[n]``) among the sampled ones; None: all.
        extra_at, extra_ids: int ``[m]``: row at this place also stops at this id, which is no EOS id.
        at: int64 ``[n]``, where each row's next token goes in the flattened ``tokens.seated``.
        counts: int32 ``[2, n]``; its lines are `known`, tokens known, and `produced`, tokens of output.
        left: commits until a row has spent its budget or filled its line.
        tokens, lengths, finished: columns of the latest commit.
    """

    source: IndexArray | None
    moves: int
    given: int
    keep: IndexArray | None
    rows: IndexArray
    extra_at: IndexArray
    extra_ids: Int32Array
    at: IndexArray
    counts: Int32Array
    known: Int32Array
    produced: Int32Array
    left: int
    rids: list[str]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    zeros: list[int]
    nothing: list[list[Any]]  # one shared empty list: entries are replaced, never appended to
    blanks: list[str]
    tokens: list[int] = attrs.field(factory=list[int])
    lengths: list[int] = attrs.field(factory=list[int])
    finished: list[int] = attrs.field(factory=list[int])

    def message(self, load: LoadReport | None, engine_index: int) -> OutputBatch:
        return OutputBatch(
            rids=self.rids,
            output_ids=OneToken(self.tokens),
            finished=self.finished,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.lengths,
            cached_tokens=self.cached_tokens,
            logprobs=self.nothing,
            top_logprobs=self.nothing,
            prompt_logprobs=self.nothing,
            prompt_top_logprobs=self.nothing,
            prompt_logprob_ids=self.nothing,
            status=self.zeros,
            messages=self.blanks,
            load=load,
            engine_index=engine_index,
        )


@attrs.define(eq=False)
class OutputState:
    """Writer: Output.

    Attributes:
        cohort: of the latest commit.
        plain: `rows` of the latest batch in which nobody wants log-probabilities.
        prompt_values, prompt_tops: log-probabilities of prompts over their chunks, for the requests
            that asked; an entry goes with the request's first token or its end.
    """

    cohort: Cohort | None = None
    plain: IndexArray | None = None
    prompt_values: dict[int, list[float | None]] = attrs.field(factory=dict[int, list[float | None]])
    prompt_tops: dict[int, list[TopLogprobs | None]] = attrs.field(factory=dict[int, list[TopLogprobs | None]])


@attrs.frozen(kw_only=True, eq=False)
class Output:
    """Owns the committed token lists (HS-1); what clients are told of them goes into the outbox.

    `is_eos`: bool ``[vocab]``, True at the model's EOS ids.
    """

    table: RequestTable
    is_eos: BoolArray
    outbox: OutputSink
    state: OutputState = attrs.field(factory=OutputState)
    seated: Int32Array = attrs.field(init=False)
    """The table's token lines behind each other, a view."""

    @seated.default
    def _seated(self) -> Int32Array:
        return self.table.tokens.seated.reshape(-1)

    def logprob_plan(self, batch: ForwardBatch) -> LogprobPlan:
        """Which rows of `batch` must return log-probabilities (OL-4)."""
        if batch.rows is not self.state.plain:
            plan = logprob_plan(self.table, batch)
            if plan is not NO_LOGPROBS:
                self._note_lone(batch)
                return plan
            self.state.plain = batch.rows
        return NO_LOGPROBS

    def commit(self, batch: ForwardBatch, result: ForwardResult) -> ForwardLanded:
        """Append the tokens of one landed forward, find the ends, collect outputs.

        A row whose request has ended in the meantime is passed over: its result is surplus (OL-7, OL-17).
        """
        if result.prompt_logprobs:
            self._collect_prompt(batch, result)
        gone = self._end_faulty(batch, result) if result.faulty else ()
        cohort, tokens = self.state.cohort, result.tokens
        same = cohort is not None and cohort.source is batch.rows and cohort.moves == self.table.moves
        if cohort is None or not same or cohort.given != len(tokens):  # fewer: not all sample this time
            cohort = self.state.cohort = self._assemble(batch)
        if len(tokens) != cohort.given:
            raise InvariantBroken("one token for each sampled row", rows=cohort.given, tokens=len(tokens))
        surplus = 0 if cohort.keep is None else _surplus(batch, cohort.keep)
        if not cohort.rids:
            return ForwardLanded(batch=batch, finished=gone, surplus=surplus)
        new = np.fromiter(tokens, np.int32, len(tokens))
        if cohort.keep is not None:
            new = new[cohort.keep]
            tokens = new.tolist()
        try:
            stops = self.is_eos.take(new)
        except IndexError as cause:
            raise InvariantBroken("a token outside the vocabulary", vocab=len(self.is_eos), tokens=tokens) from cause
        self._append(cohort, new)
        finish = None
        over = batch.rows[result.grammar_ends] if result.grammar_ends else NOBODY
        # A search in bytes is several times faster than any().
        if cohort.left <= 0 or len(cohort.extra_at) or 1 in stops.tobytes() or len(over):
            finish = self._ends(cohort, new, stops, over)
        self._tell(cohort, tokens, cohort.zeros if finish is None else finish.tolist())
        if result.token_logprobs or self.state.prompt_values:
            self._add_logprobs(batch, cohort, result)
        if finish is not None:
            ended = cohort.rows[finish != 0]
            self.table.output.owned[ended] = False
            self.table.output.finish[ended] = finish[finish != 0]
            gone += tuple(ended.tolist())
        return ForwardLanded(batch=batch, finished=gone, surplus=surplus)

    def end(self, rows: tuple[int, ...], finish: Finish, *, status: int = 0, message: str = "") -> tuple[int, ...]:
        """End live requests outside a forward's result; returns those that were still live."""
        ended = []
        for row in rows:
            if not self.table.output.owned[row]:
                continue
            self.outbox.end(row, finish, status=status, message=message)
            self.table.output.owned[row] = False
            self.table.output.finish[row] = int(finish)
            self.state.cohort = None
            self.state.prompt_values.pop(row, None)
            self.state.prompt_tops.pop(row, None)
            ended.append(row)
        return tuple(ended)

    def refuse(self, refusals: tuple[Refusal, ...]) -> None:
        """Tell clients that their requests were not accepted; such requests have no row."""
        self.outbox.refuse(refusals)

    def reject(self, rows: tuple[int, ...], message: str) -> None:
        """End requests whose submission failed with a client error; they leave at once (OL-16)."""
        self.end(rows, Finish.ABORT, status=400, message=message)

    def take(self, load: LoadReport | None) -> OutputBatch | None:
        """The round's one message (OL-12), or None if there is nothing to say."""
        return self.outbox.take(load)

    @property
    def has_output(self) -> bool:
        return self.outbox.filled

    def _assemble(self, batch: ForwardBatch) -> Cohort:
        """The cohort of a batch's live sampled rows; a row that has ended is not in it."""
        table, identity, every = self.table, self.table.identity, bool(batch.samples.all())
        rows = np.asarray(batch.rows if every else batch.rows[batch.samples], dtype=np.int64)
        given, keep, live = len(rows), None, table.output.owned[rows]
        if not live.all():
            keep = live.nonzero()[0]
            rows = rows[keep]
        slots, known = table.schedule.slot[rows].astype(np.int64), table.tokens.known[rows]
        if slots.min(initial=0) < 0:
            raise InvariantBroken("a result for a request without a slot", rows=rows[slots < 0].tolist())
        produced, width, n, listed = known - identity.prompt_len[rows], table.max_len, len(rows), rows.tolist()
        if known.max(initial=0) >= width:
            raise InvariantBroken("a token behind the end of its line", rows=rows[known >= width].tolist())
        stoppers = identity.has_extra_stops[rows].nonzero()[0].tolist()
        stops = [(i, token) for i in stoppers for token in identity.extra_stops[listed[i]]]
        counts = np.stack((known, produced))
        return Cohort(
            source=batch.rows if every else None,
            moves=table.moves,
            given=given,
            keep=keep,
            rows=rows,
            extra_at=np.array([i for i, _ in stops], dtype=np.int64),
            extra_ids=np.array([token for _, token in stops], dtype=np.int32),
            at=slots * width + known,
            counts=counts,
            known=counts[0],
            produced=counts[1],
            left=int(np.minimum(identity.max_new[rows] - produced, width - known).min(initial=width)),
            rids=[identity.rid[row] for row in listed],
            prompt_tokens=identity.prompt_len[rows].tolist(),
            cached_tokens=table.schedule.cached[rows].tolist(),
            zeros=[0] * n,
            nothing=[[]] * n,
            blanks=[""] * n,
        )

    def _end_faulty(self, batch: ForwardBatch, result: ForwardResult) -> tuple[int, ...]:
        """Logits that are not numbers end their requests, each alone (OL-6); so does a token outside its grammar."""
        gone: tuple[int, ...] = ()
        for places, status, text in (
            (result.nan_rows, 500, NAN_TEXT),
            (result.grammar_faults, 500, GRAMMAR_TEXT),
            (result.grammar_costly, 400, COSTLY_TEXT),
        ):
            if places:
                failed = tuple(batch.rows[places].tolist())
                gone += self.end(failed, Finish.ABORT, status=status, message=text)
        return gone

    def _append(self, cohort: Cohort, tokens: Int32Array) -> None:
        """Write the new tokens, int32 ``[n]``, behind the known ones."""
        self.seated[cohort.at] = tokens
        np.add(cohort.at, ONE, cohort.at)
        np.add(cohort.counts, ONE_SHORT, cohort.counts)
        self.table.tokens.known[cohort.rows] = cohort.known
        cohort.left -= 1

    def _ends(self, cohort: Cohort, tokens: Int32Array, stops: BoolArray, over: IndexArray) -> Int32Array | None:
        """`Finish` values int32 ``[n]``, or None while all go on; a stop id wins over the length limit.

        `stops`, bool ``[n]``: the token is an EOS id; written. `over`: rows whose grammar accepts nothing more.
        """
        identity, rows, produced = self.table.identity, cohort.rows, cohort.produced
        stops &= identity.eos_ends[rows]
        stops[cohort.extra_at[tokens[cohort.extra_at] == cohort.extra_ids]] = True
        stops &= produced >= identity.min_new[rows]
        if len(over):  # there is no token to go on with, whatever min_tokens and ignore_eos say
            stops |= np.isin(rows, over)
        finish: Int32Array = (produced >= identity.max_new[rows]) * LENGTH
        finish[stops] = Finish.STOP
        if cohort.left > 0 and not finish.any():
            return None  # ids that end some requests, but none of these or not yet
        self.state.cohort = None
        return finish

    def _tell(self, cohort: Cohort, tokens: list[int], finished: list[int]) -> None:
        """Note one entry a row for the round's message."""
        self.outbox.detach()  # before the cohort's columns change
        cohort.tokens, cohort.lengths, cohort.finished = tokens, cohort.produced.tolist(), finished
        self.outbox.add(cohort)

    def _add_logprobs(self, batch: ForwardBatch, cohort: Cohort, result: ForwardResult) -> None:
        """Log-probabilities of the rows that asked, for those that got a token by this commit."""
        live = set(cohort.rows.tolist())
        for place, value in result.token_logprobs.items():
            if (row := int(batch.rows[place])) in live:
                self.outbox.add_logprob(row, value, result.token_top_logprobs.get(place))
        for row in live.intersection(self.state.prompt_values):
            values, tops = self.state.prompt_values.pop(row), self.state.prompt_tops.pop(row)
            start = int(self.table.identity.prompt_from[row])
            ids = self.table.tokens_of(row)[start : start + len(values)].tolist()
            self.outbox.add_prompt_logprobs(row, values, tops, ids)

    def _note_lone(self, batch: ForwardBatch) -> None:
        """A prompt of one token has no predecessor: no forward returns its one entry, which is None."""
        identity, rows = self.table.identity, batch.rows
        lone = (identity.prompt_from[rows] == 0) & (identity.prompt_len[rows] == 1)
        for row in rows[lone & (self.table.tokens.known[rows] == 1)].tolist():
            self.state.prompt_values[row], self.state.prompt_tops[row] = [None], [None]

    def _collect_prompt(self, batch: ForwardBatch, result: ForwardResult) -> None:
        identity = self.table.identity
        for part in result.prompt_logprobs:
            row = int(batch.rows[part.index])
            if not self.table.output.owned[row]:
                continue
            start = int(identity.prompt_from[row])
            values = self.state.prompt_values.setdefault(row, [None] if start == 0 else [])
            tops = self.state.prompt_tops.setdefault(row, [None] if start == 0 else [])
            # A recomputed chunk (after a retraction) repeats positions that are already there.
            skip = start + len(values) - part.first
            if skip < 0:
                raise InvariantBroken("prompt log-probabilities with a gap", row=row, at=part.first)
            values.extend(part.values[skip:])
            tops.extend(part.top[skip:])


def _surplus(batch: ForwardBatch, keep: IndexArray) -> int:
    """Decode rows among the sampled ones that are not in `keep`."""
    decodes = batch.counts[batch.samples] == 1
    return int(np.count_nonzero(decodes)) - int(np.count_nonzero(decodes[keep]))
