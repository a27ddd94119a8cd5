"""Grammar-constrained requests: queued until compiled, admitted when ready, their rows named in each dispatch.

The scheduler knows no request of the queue. Compilers and matchers belong to another room and are
reached through their ports; this one has handles.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.plane.grammar import (
    GRAMMAR_KINDS,
    NO_GRAMMARS,
    GrammarCompiler,
    GrammarMatchers,
    GrammarPlan,
    GrammarRow,
    GrammarSource,
    GrammarVerdict,
    MatcherState,
    NoCompiler,
)
from tokenspeed.plane.messages import SamplingParams
from tokenspeed.plane.plan import ExecutionPlan, ForwardBatch
from tokenspeed.plane.ports import Clock, Mesh, Meter
from tokenspeed.plane.results import ForwardResult
from tokenspeed.plane.table import RequestTable


@attrs.frozen(kw_only=True)
class Settled:
    """Requests whose grammars are decided on every rank.

    Attributes:
        rows: to be submitted.
        failed: row, HTTP status and text of those whose grammar cannot be had.
    """

    rows: tuple[int, ...] = ()
    failed: tuple[tuple[int, int, str], ...] = ()


NOTHING_SETTLED = Settled()


class GrammarQueue(Protocol):
    def refuses(self, sampling: SamplingParams) -> str:
        """Why this request's grammar cannot be served, or ""."""
        ...

    def queue(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Keep rows whose grammar must compile first; the rest is returned for submission."""
        ...

    def ready(self) -> Settled:
        """Rows whose grammar has compiled, or has failed (RA-10)."""
        ...

    def waiting(self) -> tuple[int, ...]:
        """Rows of the queue, in order of arrival."""
        ...

    def cancel(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `rows` that were in the queue and have left it: nobody else knows them."""
        ...

    def needs_commit_first(self, batch: ForwardBatch) -> bool:
        """Whether filling this batch's masks reads matchers that only a pending commit advances."""
        ...

    def plan(self, plan: ExecutionPlan) -> GrammarPlan:
        """The constrained rows of the plan's batch, with all that is committed so far in their matchers."""
        ...

    def adopt(self, batch: ForwardBatch, result: ForwardResult) -> ForwardResult:
        """A landed forward: advance the matchers if the commit is to; the result with their ends (GR-8)."""
        ...

    def release(self, rows: tuple[int, ...]) -> None:
        """Requests that have ended."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NoGrammar:
    """Refuses every grammar by name; constrains nothing."""

    def refuses(self, sampling: SamplingParams) -> str:
        for kind in GRAMMAR_KINDS:
            if getattr(sampling, kind) is not None:
                return f"{kind}: this engine runs without a grammar backend (grammar.backend)"
        return ""

    def queue(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return rows

    def ready(self) -> Settled:
        return NOTHING_SETTLED

    def waiting(self) -> tuple[int, ...]:
        return ()

    def cancel(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def needs_commit_first(self, batch: ForwardBatch) -> bool:
        return False

    def plan(self, plan: ExecutionPlan) -> GrammarPlan:
        return NO_GRAMMARS

    def adopt(self, batch: ForwardBatch, result: ForwardResult) -> ForwardResult:
        return result

    def release(self, rows: tuple[int, ...]) -> None:
        return None


@attrs.define(eq=False)
class QueueState:
    """Writer: CompiledGrammars.

    Attributes:
        handles: of live constrained requests, by row.
        waiting: handles whose compilation is not settled, by row, in order of arrival.
        landed: verdicts of this rank that not every rank has yet, by handle.
        since_s: when each of those was queued, by handle.
        reseated: rows that have been seated since they were last sampled.
    """

    handles: dict[int, int] = attrs.field(factory=dict[int, int])
    waiting: dict[int, int] = attrs.field(factory=dict[int, int])
    landed: dict[int, GrammarVerdict] = attrs.field(factory=dict[int, GrammarVerdict])
    since_s: dict[int, float] = attrs.field(factory=dict[int, float])
    reseated: set[int] = attrs.field(factory=set[int])


@attrs.frozen(kw_only=True, eq=False)
class CompiledGrammars:
    """`GrammarQueue` over a compiler. The queue is bounded by the compiler, which fails what it has no room for.

    Attributes:
        eager: which path batches take; see `GrammarPlan`.
    """

    table: RequestTable
    compiler: GrammarCompiler
    matchers: GrammarMatchers
    mesh: Mesh
    meter: Meter
    clock: Clock
    eager: bool
    state: QueueState = attrs.field(factory=QueueState)

    def refuses(self, sampling: SamplingParams) -> str:
        return ""

    def queue(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        plain = []
        for row in rows:
            source = self.table.identity.sampling[row].grammar
            if source is None:
                plain.append(row)
            else:
                self._queue(row, source)
        return tuple(plain)

    def _queue(self, row: int, source: GrammarSource) -> None:
        state = self.state
        handle = state.handles[row] = state.waiting[row] = self.compiler.submit(source)
        state.since_s[handle] = self.clock.now_s()
        self.meter.grammars_waiting(len(state.waiting))

    def ready(self) -> Settled:
        state = self.state
        if not state.waiting:
            return NOTHING_SETTLED
        wanted = frozenset(state.waiting.values())
        for verdict in self.compiler.ready():
            if verdict.handle in wanted:
                state.landed[verdict.handle] = verdict
        rows, failed = [], []
        for row, (status, error) in self._agreed().items():
            self._decided(state.waiting.pop(row), status if error else 0)
            if error:
                self.release((row,))
                failed.append((row, status, error))
            else:
                rows.append(row)
        return Settled(rows=tuple(rows), failed=tuple(failed))

    def waiting(self) -> tuple[int, ...]:
        return tuple(self.state.waiting)

    def cancel(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        gone = tuple(row for row in rows if row in self.state.waiting)
        self.release(gone)
        return gone

    def needs_commit_first(self, batch: ForwardBatch) -> bool:
        handles = self.state.handles
        return self.eager and bool(handles) and any(row in handles for row in batch.rows[batch.samples].tolist())

    def plan(self, plan: ExecutionPlan) -> GrammarPlan:
        state, batch = self.state, plan.batch
        if not state.handles:
            return NO_GRAMMARS
        state.reseated.update(row for row in plan.seated if row in state.handles)
        if batch is None:
            return NO_GRAMMARS
        sampled = batch.samples.nonzero()[0].tolist()
        found = [(at, row) for at in sampled if (row := int(batch.rows[at])) in state.handles]
        rows = tuple(self._row(batch, at, row) for at, row in found)
        return GrammarPlan(rows=rows, eager=self.eager) if rows else NO_GRAMMARS

    def _row(self, batch: ForwardBatch, at: int, row: int) -> GrammarRow:
        handle, known = self.state.handles[row], None
        prompt_len = int(self.table.identity.prompt_len[row])
        if row in self.state.reseated:
            self.state.reseated.discard(row)
            known = tuple(self.table.tokens_of(row)[prompt_len:].tolist())
            if self.eager:
                self.matchers.bring(handle, known)
                known = None
        produced = int(batch.starts[at]) + int(batch.counts[at]) - prompt_len
        return GrammarRow(index=at, handle=handle, produced=produced, known=known)

    def adopt(self, batch: ForwardBatch, result: ForwardResult) -> ForwardResult:
        handles = self.state.handles
        if not self.eager or not handles:
            return result
        nan = frozenset(result.nan_rows)
        sampled = zip(batch.samples.nonzero()[0].tolist(), result.tokens, strict=True)
        mine = [
            (at, handles[row], token)
            for at, token in sampled
            if at not in nan and (row := int(batch.rows[at])) in handles and self.table.output.owned[row]
        ]
        if not mine:
            return result
        states = self.matchers.accept([handle for _, handle, _ in mine], [token for _, _, token in mine])
        where = [(at, state) for (at, _, _), state in zip(mine, states, strict=True)]
        return attrs.evolve(
            result,
            grammar_ends=[at for at, state in where if state is MatcherState.ENDED],
            grammar_faults=[at for at, state in where if state is MatcherState.REFUSED],
            grammar_costly=[at for at, state in where if state is MatcherState.COSTLY],
        )

    def release(self, rows: tuple[int, ...]) -> None:
        state = self.state
        if not state.handles:
            return
        for row in rows:
            handle = state.handles.pop(row, None)
            if handle is not None:
                if state.waiting.pop(row, None) is not None:
                    self.meter.grammars_waiting(len(state.waiting))
                state.landed.pop(handle, None)
                state.since_s.pop(handle, None)
                state.reseated.discard(row)
                self.compiler.drop(handle)

    def _decided(self, handle: int, status: int) -> None:
        state = self.state
        verdict, since_s = state.landed.pop(handle), state.since_s.pop(handle)
        self.meter.grammars_waiting(len(state.waiting))
        self.meter.grammar_decided(waited_s=self.clock.now_s() - since_s, compile_s=verdict.compile_s, status=status)

    def _agreed(self) -> dict[int, tuple[int, str]]:
        """Status and error of each waiting row that every rank has a verdict for (GR-2, GR-3): the first error."""
        state, rid = self.state, self.table.identity.rid
        mine = {rid[row]: state.landed[handle] for row, handle in state.waiting.items() if handle in state.landed}
        facts = tuple((name, verdict.status, verdict.error) for name, verdict in mine.items())
        views = [{name: (status, error) for name, status, error in view} for view in self.mesh.gather(facts)]
        found = {}
        for row in state.waiting:
            verdicts = [view[rid[row]] for view in views if rid[row] in view]
            if len(verdicts) == len(views):
                found[row] = next((verdict for verdict in verdicts if verdict[1]), verdicts[0])
        return found


def grammar_queue(
    *,
    table: RequestTable,
    compiler: GrammarCompiler,
    matchers: GrammarMatchers,
    mesh: Mesh,
    meter: Meter,
    clock: Clock,
    eager: bool,
) -> GrammarQueue:
    """The queue over `compiler`; `NoGrammar` where nothing compiles."""
    if isinstance(compiler, NoCompiler):
        return NoGrammar()
    return CompiledGrammars(
        table=table,
        compiler=compiler,
        matchers=matchers,
        mesh=mesh,
        meter=meter,
        clock=clock,
        eager=eager,
    )
