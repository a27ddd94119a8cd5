"""Constrained requests on the control side: the queue ahead of the scheduler, admission, matchers, ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import attrs
import pytest
from rig import Rig, ScriptedScheduler, hand_rig, request

from tokenspeed.control.grammar import CompiledGrammars, GrammarQueue
from tokenspeed.plane.grammar import GrammarRow, GrammarSource, GrammarVerdict, MatcherState
from tokenspeed.plane.messages import Finish, Int32Array, PauseMode, PauseOp, SamplingParams
from tokenspeed.plane.ports import Mesh
from tokenspeed.settings.choices import GrammarFill
from tokenspeed.settings.grammar import GrammarSettings
from tokenspeed.settings.model import SchedulerSettings, Settings
from tokenspeed.telemetry.meters import NullMeter
from tokenspeed.testing import HandClock, memory_mesh

AB = SamplingParams(regex="ab", temperature=0.0, ignore_eos=True)


@attrs.define(eq=False)
class HandCompiler:
    """Verdicts come when a test gives them; `at_once`: with the submission."""

    at_once: bool = False
    handles: int = 0
    sources: list[GrammarSource] = attrs.field(factory=list)
    verdicts: list[GrammarVerdict] = attrs.field(factory=list)
    dropped: list[int] = attrs.field(factory=list)

    def submit(self, source: GrammarSource) -> int:
        self.handles += 1
        self.sources.append(source)
        if self.at_once:
            self.give(self.handles)
        return self.handles

    def give(self, handle: int, error: str = "", status: int = 400, compile_s: float | None = None) -> None:
        self.verdicts.append(GrammarVerdict(handle=handle, error=error, status=status, compile_s=compile_s))

    def ready(self) -> tuple[GrammarVerdict, ...]:
        found, self.verdicts = tuple(self.verdicts), []
        return found

    def drop(self, handle: int) -> None:
        self.dropped.append(handle)

    def close(self) -> None:
        return None


@attrs.define(eq=False)
class HandMatchers:
    """Notes who does what; each matcher ends after `length` tokens."""

    length: int = 1000
    refuses: bool = False
    costs: bool = False
    words: int = 32
    log: list[str] = attrs.field(factory=list)
    threads: list[str] = attrs.field(factory=list)
    accepted: dict[int, list[int]] = attrs.field(factory=dict)

    def fill(self, rows: Sequence[GrammarRow], words: Int32Array) -> None:
        self.log.append("fill")
        words[:] = -1

    def bring(self, handle: int, tokens: Sequence[int]) -> None:
        self.threads.append(threading.current_thread().name)
        self.accepted[handle] = list(tokens)

    def accept(self, handles: Sequence[int], tokens: Sequence[int]) -> tuple[MatcherState, ...]:
        self.log.append("advance")
        self.threads.append(threading.current_thread().name)
        found = []
        for handle, token in zip(handles, tokens, strict=True):
            mine = self.accepted.setdefault(handle, [])
            mine.append(token)
            over = MatcherState.ENDED if len(mine) == self.length else MatcherState.OPEN
            over = MatcherState.COSTLY if self.costs else over
            found.append(MatcherState.REFUSED if self.refuses else over)
        return tuple(found)


def constrained_rig(compiler: HandCompiler, matchers: HandMatchers | None = None, **more: object) -> Rig:
    fill = more.pop("fill", GrammarFill.AUTO)
    settings = Settings(
        scheduler=SchedulerSettings(overlap=bool(more.pop("overlap", True)), chunk_tokens=32, max_waiting=64),
        grammar=GrammarSettings(fill=fill),  # type: ignore[arg-type]
    )
    return hand_rig(settings=settings, compiler=compiler, matchers=matchers or HandMatchers(), **more)  # type: ignore[arg-type]


@pytest.mark.contract("GR-1", "RA-10")
def test_a_constrained_request_is_unknown_to_the_scheduler_until_its_grammar_has_compiled() -> None:
    compiler = HandCompiler()
    rig = constrained_rig(compiler)
    rig.put(request("g", 3, sampling=AB), request("plain", 3))
    rig.rounds(3)
    row = rig.loop.table.row_of("g")
    assert row is not None
    assert not rig.loop.scheduler.holds(row)
    assert rig.link.tokens("plain")
    compiler.give(1)
    rig.settle()
    assert len(rig.link.tokens("g")) == 4
    assert compiler.sources == [GrammarSource(kind="regex", text="ab")]
    assert compiler.dropped == [1]
    assert rig.loop.table.live == 0


@pytest.mark.contract("GR-3")
def test_a_grammar_that_does_not_compile_ends_its_request_with_the_client_s_error_and_no_other() -> None:
    compiler = HandCompiler()
    scheduler_saw: list[int] = []
    rig = constrained_rig(compiler)
    rig.put(request("bad", 3, sampling=AB), request("full", 3, sampling=AB), request("plain", 3))
    rig.rounds(1)
    compiler.give(1, "regex: no such thing")
    compiler.give(2, "64 grammars already wait", status=429)
    rig.settle()
    assert rig.link.finish("bad") == (Finish.ABORT, 400, "regex: no such thing")
    assert rig.link.finish("full") == (Finish.ABORT, 429, "64 grammars already wait")
    assert len(rig.link.tokens("plain")) == 4
    assert (compiler.dropped, scheduler_saw, rig.loop.table.live) == ([1, 2], [], 0)


def test_a_request_that_goes_away_while_its_grammar_compiles_leaves_nothing() -> None:
    compiler = HandCompiler()
    rig = constrained_rig(compiler)
    rig.put(request("g", 3, sampling=AB))
    rig.rounds(1)
    rig.abort("g")
    rig.settle()
    compiler.give(1)
    rig.settle()
    assert rig.link.finish("g") == (Finish.ABORT, 0, "the client cancelled the request")
    assert (compiler.dropped, rig.loop.table.live) == ([1], 0)
    rig.put(request("g", 3, sampling=AB))
    rig.rounds(1)
    compiler.give(2)
    rig.settle()
    assert len(rig.link.tokens("g")) == 4


@pytest.mark.contract("CP-13")
@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
def test_a_drain_ends_requests_that_still_wait_for_their_grammars(mode: PauseMode) -> None:
    compiler = HandCompiler()
    rig = constrained_rig(compiler)
    rig.put(request("g", 3, sampling=AB), request("plain", 3))
    rig.rounds(1)
    rig.put(PauseOp(call_id=1, mode=mode))
    rig.settle()
    finish = rig.link.finish("g")
    assert finish is not None
    assert finish[0] == Finish.ABORT
    assert [reply.success for reply in rig.link.replies] == [True]
    assert rig.loop.table.live == 0


def test_requests_whose_grammars_compile_count_as_waiting() -> None:
    rig = constrained_rig(HandCompiler())
    rig.put(*(request(f"g{i}", 3, sampling=AB) for i in range(64)))
    rig.rounds(1)
    rig.put(request("one more", 3))
    rig.rounds(1)
    finish = rig.link.finish("one more")
    assert finish is not None
    assert finish[1] == 429


@pytest.mark.contract("GR-11")
def test_without_a_backend_a_grammar_is_a_client_s_error_at_ingress_and_the_scheduler_sees_nothing() -> None:
    scheduler = ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler)
    rig.put(request("g", 3, sampling=AB))
    rig.rounds(1)
    finish = rig.link.finish("g")
    assert finish is not None
    assert finish[:2] == (Finish.ABORT, 400)
    assert "grammar.backend" in finish[2]
    assert rig.loop.state.funnelled == 0
    assert rig.loop.table.live == 0


@pytest.mark.contract("GR-2", "GR-3")
@pytest.mark.parametrize("error", ["", "regex: was not compiled within 5 s"])
def test_two_ranks_admit_or_refuse_a_request_in_the_same_round_and_not_before_both_have_a_verdict(error: str) -> None:
    """Compiled on member 0 at round 3, decided on member 1 at round 7."""
    seen: dict[int, list[tuple[int, ...]]] = {}

    def member(mesh: Mesh) -> None:
        compiler = HandCompiler()
        rig = constrained_rig(compiler)
        rig.put(request("g", 3, sampling=AB))
        rig.rounds(1)
        queue = over_mesh(rig, compiler, mesh)
        row = rig.loop.table.row_of("g")
        assert row is not None
        queue.queue((row,))
        found = []
        for number in range(10):
            if number == (3 if mesh.rank == 0 else 7):
                compiler.give(compiler.handles, error if mesh.rank else "")
            settled = queue.ready()
            found.append(settled.rows or tuple(-one - 1 for one, _, _ in settled.failed))
        seen[mesh.rank] = found

    members = [threading.Thread(target=member, args=(mesh,)) for mesh in memory_mesh(2)]
    for one in members:
        one.start()
    for one in members:
        one.join(30)
    assert seen[0] == seen[1]
    decided = [number for number, rows in enumerate(seen[0]) if rows]
    assert decided == [7]
    assert (seen[0][7][0] < 0) == bool(error)


def over_mesh(rig: Rig, compiler: HandCompiler, mesh: Mesh) -> GrammarQueue:
    return CompiledGrammars(
        table=rig.loop.table,
        compiler=compiler,
        matchers=HandMatchers(),
        mesh=mesh,
        meter=NullMeter(),
        clock=HandClock(),
        eager=True,
    )


@attrs.define(eq=False)
class GrammarTimes(NullMeter):
    """What the queue tells of itself."""

    waiting: list[int] = attrs.field(factory=list)
    decided: list[tuple[float, float | None, int]] = attrs.field(factory=list)

    def grammars_waiting(self, count: int) -> None:
        self.waiting.append(count)

    def grammar_decided(self, *, waited_s: float, compile_s: float | None, status: int) -> None:
        self.decided.append((waited_s, compile_s, status))


def test_the_queue_tells_how_many_wait_and_of_each_how_long_it_waited_and_what_came_of_it() -> None:
    compiler, meter = HandCompiler(), GrammarTimes()
    rig = constrained_rig(compiler, meter=meter)
    rig.put(*(request(name, 3, sampling=AB) for name in ("made", "bad", "found", "gone")))
    rig.rounds(1)
    rig.clock.advance(2.0)
    compiler.give(1, compile_s=1.5)
    compiler.give(3)
    rig.rounds(1)
    rig.abort("gone")
    rig.rounds(1)
    rig.clock.advance(1.0)
    compiler.give(2, "regex: no", compile_s=0.25)
    rig.settle()
    assert meter.waiting == [1, 2, 3, 4, 3, 2, 1, 0]
    assert meter.decided == [(2.0, 1.5, 0), (2.0, None, 0), (3.0, 0.25, 400)]


@pytest.mark.contract("GR-8", "GR-9", "DO-10")
@pytest.mark.parametrize("overlap", [True, False])
def test_on_the_eager_path_a_batch_drains_and_the_commit_advances_matchers_on_the_control_thread(
    overlap: bool,
) -> None:
    matchers = HandMatchers()
    rig = constrained_rig(HandCompiler(at_once=True), matchers, fill=GrammarFill.EAGER, overlap=overlap)
    depths = []
    rig.put(request("g", 3, sampling=AB, max_new=5))
    for _ in range(8):
        rig.rounds(1)
        depths.append(len(rig.loop.state.in_flight))
    rig.settle()
    plans = [dispatch.grammars for dispatch in rig.plane.dispatches if dispatch.grammars]
    assert [plan.eager for plan in plans] == [True] * 5
    assert [row.produced for plan in plans for row in plan.rows] == [0, 1, 2, 3, 4]
    assert [row.known for plan in plans for row in plan.rows] == [None] * 5
    assert matchers.accepted[1] == rig.link.tokens("g")
    assert set(matchers.threads) == {threading.current_thread().name}
    names = [name for name in rig.plane.names() if name in ("execute", "commit")]
    assert names[:6] == ["execute", "commit"] * 3
    assert max(depths) <= 1


@pytest.mark.contract("GR-9", "DO-10", "GR-5")
def test_on_the_forward_s_path_nothing_drains_and_the_control_thread_leaves_matchers_alone() -> None:
    matchers = HandMatchers()
    rig = constrained_rig(HandCompiler(at_once=True), matchers)
    rig.put(request("g", 3, sampling=AB, max_new=5))
    rig.settle()
    assert (matchers.log, matchers.threads) == ([], [])
    plans = [dispatch.grammars for dispatch in rig.plane.dispatches if dispatch.grammars]
    assert {plan.eager for plan in plans} == {False}
    assert [row.known for plan in plans for row in plan.rows][:2] == [(), None]
    names = [name for name in rig.plane.names() if name in ("execute", "commit")]
    assert names[:2] == ["execute", "execute"]


def test_a_grammar_that_accepts_nothing_more_ends_its_request_whatever_min_tokens_and_ignore_eos_say() -> None:
    rig = constrained_rig(HandCompiler(at_once=True), HandMatchers(length=3), fill=GrammarFill.EAGER)
    rig.put(request("g", 3, sampling=attrs.evolve(AB, min_new_tokens=6), max_new=8), request("plain", 3, max_new=8))
    rig.settle()
    assert len(rig.link.tokens("g")) == 3
    assert rig.link.finish("g") == (Finish.STOP, 0, "")
    assert len(rig.link.tokens("plain")) == 8


def test_a_token_outside_the_grammar_ends_its_request_alone() -> None:
    rig = constrained_rig(HandCompiler(at_once=True), HandMatchers(refuses=True), fill=GrammarFill.EAGER)
    rig.put(request("g", 3, sampling=AB, max_new=8), request("plain", 3, max_new=8))
    rig.settle()
    finish = rig.link.finish("g")
    assert finish is not None
    assert finish[:2] == (Finish.ABORT, 500)
    assert "outside" in finish[2]
    assert len(rig.link.tokens("plain")) == 8
    assert rig.loop.table.live == 0


def test_a_grammar_that_costs_too_much_ends_its_request_alone_as_the_client_s_error() -> None:
    rig = constrained_rig(HandCompiler(at_once=True), HandMatchers(costs=True), fill=GrammarFill.EAGER)
    rig.put(request("g", 3, sampling=AB, max_new=8), request("plain", 3, max_new=8))
    rig.settle()
    finish = rig.link.finish("g")
    assert finish is not None
    assert finish[:2] == (Finish.ABORT, 400)
    assert "grammar.token_ms" in finish[2]
    assert len(rig.link.tokens("plain")) == 8
    assert rig.loop.table.live == 0
