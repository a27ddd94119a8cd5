"""The round's one message to the frontend, while it is put together (OL-12).

The entries of a commit are sent as they are if nothing else happens in the round: then the message costs
no Python object a request but the tokens and lengths in it. Else they become columns, which can be changed.
"""

from __future__ import annotations

from typing import Any

import attrs

from tokenspeed.plane.messages import Finish, LoadReport, OutputBatch, Refusal, TopLogprobs
from tokenspeed.plane.outputs import Entries
from tokenspeed.plane.table import RequestTable


@attrs.define(eq=False)
class Columns:
    """Writer: Outbox. The next message under way; `index` finds a request's entry by its row."""

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
    prompt_logprob_ids: list[list[int]] = attrs.field(factory=list[list[int]])
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
        for column in self._logprob_columns():
            column.append([])
        self.status.append(0)
        self.messages.append("")
        return len(self.rids) - 1

    def extend(self, entries: Entries) -> None:
        """All entries of a commit; none of their rows has one yet."""
        self.index.update((row, at) for at, row in enumerate(entries.rows.tolist(), len(self.rids)))
        self.rids += entries.rids
        self.output_ids += [[token] for token in entries.tokens]
        self.finished += entries.finished
        self.prompt_tokens += entries.prompt_tokens
        self.completion_tokens += entries.lengths
        self.cached_tokens += entries.cached_tokens
        for column in self._logprob_columns():
            column.extend(entries.nothing)
        self.status += entries.zeros
        self.messages += entries.blanks

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
            prompt_logprob_ids=self.prompt_logprob_ids,
            status=self.status,
            messages=self.messages,
            load=load,
            engine_index=engine_index,
        )

    def _logprob_columns(self) -> tuple[list[list[Any]], ...]:
        prompt = (self.prompt_logprobs, self.prompt_top_logprobs, self.prompt_logprob_ids)
        return (self.logprobs, self.top_logprobs, *prompt)


@attrs.define(eq=False)
class OutboxState:
    """Writer: Outbox. `pending`: what there is to send: the latest commit alone, or columns of several events."""

    pending: Columns | Entries | None = None


@attrs.frozen(kw_only=True, eq=False)
class Outbox:
    """`plane.outputs.OutputSink`. Control thread only."""

    table: RequestTable
    engine_index: int = 0
    state: OutboxState = attrs.field(factory=OutboxState)

    @property
    def filled(self) -> bool:
        return self.state.pending is not None

    def take(self, load: LoadReport | None) -> OutputBatch | None:
        pending, self.state.pending = self.state.pending, None
        if pending is None and load is None:
            return None
        return (pending or Columns()).message(load, self.engine_index)

    def detach(self) -> None:
        if self.state.pending is not None:
            self._columns()

    def add(self, entries: Entries) -> None:
        if self.state.pending is None:
            self.state.pending = entries
            return
        columns = self._columns()
        if columns.index.keys().isdisjoint(rows := entries.rows.tolist()):
            columns.extend(entries)
            return
        for i, row in enumerate(rows):  # a second commit of the round
            at = self._entry(columns, row)
            columns.output_ids[at] = [*columns.output_ids[at], entries.tokens[i]]
            columns.completion_tokens[at], columns.finished[at] = entries.lengths[i], entries.finished[i]

    def end(self, row: int, finish: Finish, *, status: int, message: str) -> None:
        columns = self._columns()
        at = self._entry(columns, row)
        columns.finished[at], columns.status[at], columns.messages[at] = int(finish), status, message

    def refuse(self, refusals: tuple[Refusal, ...]) -> None:
        for refusal in refusals:
            columns = self._columns()
            at = columns.blank(refusal.rid, prompt=0, completion=0, cached=0)
            columns.finished[at] = int(Finish.ABORT)
            columns.status[at], columns.messages[at] = refusal.status, refusal.message

    def add_logprob(self, row: int, value: float, top: TopLogprobs | None) -> None:
        columns = self._columns()
        at = columns.index[row]
        columns.logprobs[at] = [*columns.logprobs[at], value]
        if top is not None:
            columns.top_logprobs[at] = [*columns.top_logprobs[at], top]

    def add_prompt_logprobs(
        self, row: int, values: list[float | None], tops: list[TopLogprobs | None], ids: list[int]
    ) -> None:
        columns = self._columns()
        at = columns.index[row]
        columns.prompt_logprobs[at] = values
        columns.prompt_top_logprobs[at] = tops
        columns.prompt_logprob_ids[at] = ids

    def _columns(self) -> Columns:
        """What there is to send, as columns that can be changed."""
        pending = self.state.pending
        if isinstance(pending, Columns):
            return pending
        columns = self.state.pending = Columns()
        if pending is not None:
            columns.extend(pending)
        return columns

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
