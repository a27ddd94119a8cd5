"""The compile pool over a compiler that can be held, counted and made to fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from tokenspeed.grammar.backend import GrammarRefused
from tokenspeed.grammar.limits import GrammarLimits
from tokenspeed.grammar.matchers import Matchers
from tokenspeed.grammar.pool import THREAD_NAME, CompilePool
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarRow, GrammarSource, GrammarVerdict
from tokenspeed.plane.messages import Int32Array

WAIT_S = 20.0


@attrs.define(eq=False)
class OneToken:
    """Allows nothing but one token, for ever."""

    token: int
    resets: int = 0

    def fill(self, words: Int32Array, row: int) -> None:
        words[row] = 0
        words[row, self.token // 32] = 1 << self.token % 32

    def accept(self, token: int) -> bool:
        return token == self.token

    def ended(self) -> bool:
        return False

    def reset(self) -> None:
        self.resets += 1


@attrs.frozen
class Compiled:
    token: int
    nbytes: int = 1000

    def matcher(self) -> OneToken:
        return OneToken(self.token)


@attrs.define(eq=False)
class Backend:
    """A source's text is the token that its grammar allows."""

    compiled: list[str] = attrs.field(factory=list)

    def compile(self, source: GrammarSource) -> Compiled:
        self.compiled.append(source.text)
        return Compiled(int(source.text))


@attrs.define(eq=False)
class Trial:
    """Held while the gate is closed; `refuses` are texts that cannot be compiled."""

    gate: threading.Event
    refuses: tuple[str, ...] = ()
    at_work: threading.Event = attrs.field(factory=threading.Event)
    prepared: threading.Event = attrs.field(factory=threading.Event)
    killed: threading.Event = attrs.field(factory=threading.Event)

    def start(self) -> None:
        return None

    def prepare(self, vocabulary: Vocabulary) -> None:
        self.prepared.set()
        if "" in self.refuses:
            raise GrammarRefused("there is no library")

    def attempt(self, source: GrammarSource, vocabulary: Vocabulary) -> None:
        self.at_work.set()
        while not self.gate.wait(0.01):
            if self.killed.is_set():
                self.killed.clear()
                raise GrammarRefused("ended")
        if source.text in self.refuses:
            raise GrammarRefused("the text makes no sense")

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> None:
        self.killed.set()


@attrs.define(eq=False)
class Bell:
    rung: threading.Event = attrs.field(factory=threading.Event)

    def set(self) -> None:
        self.rung.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self.rung.wait(timeout_s)


@attrs.define(eq=False)
class Rig:
    limits: GrammarLimits = attrs.field(factory=GrammarLimits)
    refuses: tuple[str, ...] = ()
    workers: int = 1
    gate: threading.Event = attrs.field(factory=threading.Event)
    backend: Backend = attrs.field(factory=Backend)
    bell: Bell = attrs.field(factory=Bell)
    loads: list[int] = attrs.field(factory=list)
    trials: list[Trial] = attrs.field(factory=list)
    pool: CompilePool = attrs.field(init=False)
    now: list[float] = attrs.field(factory=lambda: [0.0])

    def __attrs_post_init__(self) -> None:
        self.pool = CompilePool(
            matchers=Matchers(vocab_size=64),
            limits=self.limits,
            wakeup=self.bell,
            workers=self.workers,
            vocabulary=self.vocabulary,
            load=lambda _: self.backend,
            trial=self.trial,
            fault=lambda source: "is a bad word" if source.text == "13" else "",
            now_s=lambda: self.now[0],
        )

    def vocabulary(self) -> Vocabulary:
        self.loads.append(1)
        return Vocabulary(tokens=(b"a",) * 64, stops=())

    def trial(self) -> Trial:
        self.trials.append(Trial(gate=self.gate, refuses=self.refuses))
        return self.trials[-1]

    def verdicts(self, count: int) -> dict[int, GrammarVerdict]:
        """The next `count`, waiting for the bell between them."""
        found: dict[int, GrammarVerdict] = {}
        while len(found) < count:
            assert self.bell.wait(WAIT_S), "no wakeup"
            self.bell.rung.clear()
            found.update((verdict.handle, verdict) for verdict in self.pool.ready())
        return found


def text(token: int | str) -> GrammarSource:
    return GrammarSource(kind="regex", text=str(token))


@pytest.fixture
def rig() -> object:
    made = Rig()
    made.gate.set()
    yield made
    made.pool.close()


@pytest.mark.contract("GR-4", "PT-25")
def test_a_grammar_compiles_once_and_every_request_gets_a_matcher_of_its_own(rig: Rig) -> None:
    first = rig.pool.submit(text(3))
    rig.verdicts(1)
    second = rig.pool.submit(text(3))
    other = rig.pool.submit(text(4))
    rig.verdicts(2)
    assert rig.backend.compiled == ["3", "4"]
    assert len({id(rig.pool.matchers.table.live[handle].matcher) for handle in (first, second, other)}) == 3
    words = np.zeros((3, 2), dtype=np.int32)
    rows = [GrammarRow(index=i, handle=handle, produced=0) for i, handle in enumerate((first, second, other))]
    rig.pool.matchers.fill(rows, words)
    assert words[:, 0].tolist() == [8, 8, 16]


@pytest.mark.contract("GR-4")
def test_requests_of_one_grammar_that_come_while_it_compiles_wait_for_the_same_compilation() -> None:
    rig = Rig()
    handles = [rig.pool.submit(text(5)) for _ in range(6)]
    rig.gate.set()
    assert set(rig.verdicts(6)) == set(handles)
    assert rig.backend.compiled == ["5"]
    assert rig.loads == [1]
    rig.pool.close()


def test_what_a_compilation_took_is_told_once_with_the_first_of_those_who_waited_for_it() -> None:
    rig = Rig(refuses=("7",))
    first, second, bad = rig.pool.submit(text(5)), rig.pool.submit(text(5)), rig.pool.submit(text(7))
    while not rig.trials:
        pass
    assert rig.trials[0].at_work.wait(WAIT_S)
    rig.now[0] = 2.5
    rig.gate.set()
    found = rig.verdicts(3)
    later = rig.pool.submit(text(5))
    found |= rig.verdicts(1)
    assert [found[one].compile_s for one in (first, second, bad, later)] == [2.5, None, 0.0, None]
    rig.pool.close()


@pytest.mark.contract("PT-11", "PT-13")
def test_compiling_happens_on_named_threads_that_start_with_the_first_grammar_and_end_with_the_pool() -> None:
    rig = Rig(workers=2)
    assert not _threads()
    rig.pool.submit(text(1))
    rig.pool.submit(text(2))
    rig.pool.submit(text(3))
    assert 1 <= len(_threads()) <= 2
    rig.gate.set()
    rig.verdicts(3)
    rig.pool.close()
    assert not _threads()


def test_a_pool_that_is_warmed_has_loaded_all_when_the_first_grammar_comes() -> None:
    rig = Rig(workers=2)
    rig.gate.set()
    rig.pool.warm(0.0)
    rig.pool.warm(0.0)
    until(lambda: rig.trials and rig.trials[0].prepared.is_set())
    handle = rig.pool.submit(text(7))
    assert rig.verdicts(1)[handle].error == ""
    assert (len(rig.loads), len(rig.trials)) == (1, 1)
    rig.pool.close()


def test_a_grammar_does_not_wait_for_the_time_at_which_a_pool_would_be_warmed() -> None:
    rig = Rig()
    rig.gate.set()
    rig.pool.warm(1e6)
    handle = rig.pool.submit(text(7))
    assert rig.verdicts(1)[handle].error == ""
    assert not rig.trials[0].prepared.is_set()
    rig.pool.close()


def test_a_pool_that_is_closed_before_it_is_warmed_joins_its_thread() -> None:
    rig = Rig()
    rig.pool.warm(1e6)
    rig.pool.close()
    rig.pool.warm(0.0)
    assert (_threads(), rig.loads) == ([], [])


def test_what_fails_when_it_is_loaded_ahead_is_left_to_the_first_grammar(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(refuses=("",))
    rig.gate.set()
    rig.pool.warm(0.0)
    until(lambda: rig.trials and rig.trials[0].prepared.is_set())
    handle = rig.pool.submit(text(7))
    assert rig.verdicts(1)[handle].error == ""
    assert "there is no library" in caplog.text
    rig.pool.close()


def until(look: Callable[[], object]) -> None:
    wanted = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < wanted
        threading.Event().wait(0.001)


def _threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(THREAD_NAME)]


@pytest.mark.contract("GR-3")
def test_what_cannot_be_compiled_is_a_client_s_error_with_the_compiler_s_words() -> None:
    rig = Rig(refuses=("7",))
    rig.gate.set()
    bad, walked, good = rig.pool.submit(text(7)), rig.pool.submit(text(13)), rig.pool.submit(text(8))
    found = rig.verdicts(3)
    assert (found[bad].status, found[bad].error) == (400, "regex: the text makes no sense")
    assert (found[walked].status, found[walked].error) == (400, "regex: is a bad word")
    assert found[good].error == ""
    assert rig.backend.compiled == ["8"]
    rig.pool.close()


def test_a_text_that_is_too_large_is_refused_with_both_numbers_and_never_queued() -> None:
    rig = Rig(limits=GrammarLimits(source_bytes=10))
    handle = rig.pool.submit(GrammarSource(kind="json_schema", text="é" * 6))
    error = rig.verdicts(1)[handle].error
    assert error == "json_schema: got 12 bytes, must be at most 10 (grammar.max_source_kib)"
    assert not _threads()
    rig.pool.close()


def test_the_queue_is_bounded_and_says_so_with_429() -> None:
    rig = Rig(limits=GrammarLimits(queue=2))
    rig.pool.submit(text(0))
    while not rig.trials:
        pass
    assert rig.trials[0].at_work.wait(WAIT_S)
    waiting = [rig.pool.submit(text(token)) for token in (1, 2)]
    refused = rig.pool.submit(text(3))
    assert (verdict := rig.verdicts(1)[refused]).status == 429
    assert "grammar.queue" in verdict.error
    rig.gate.set()
    assert set(waiting) <= set(rig.verdicts(3))
    rig.pool.close()


def test_a_request_that_waits_too_long_for_its_grammar_is_told_so() -> None:
    rig = Rig(limits=GrammarLimits(timeout_s=5.0))
    first, late = rig.pool.submit(text(1)), rig.pool.submit(text(2))
    while not rig.trials:
        pass
    assert rig.trials[0].at_work.wait(WAIT_S)
    rig.now[0] = 6.0
    rig.gate.set()
    found = rig.verdicts(2)
    assert found[first].error == ""
    assert found[late].error == "regex: was not compiled within 5 s (grammar.timeout_s)"
    rig.pool.close()


def test_a_request_that_goes_away_frees_the_place_where_its_grammar_compiles() -> None:
    rig = Rig()
    gone, queued = rig.pool.submit(text(1)), rig.pool.submit(text(2))
    while not rig.trials:
        pass
    assert rig.trials[0].at_work.wait(WAIT_S)
    rig.pool.drop(queued)
    rig.pool.drop(gone)
    rig.gate.set()
    stays = rig.pool.submit(text(3))
    assert set(rig.verdicts(1)) == {stays}
    assert set(rig.pool.matchers.table.live) == {stays}
    rig.pool.drop(stays)
    assert not rig.pool.matchers.table.live
    assert not rig.pool.state.open
    rig.pool.close()


def test_one_of_two_requests_going_away_leaves_the_other_its_grammar() -> None:
    rig = Rig()
    gone, stays = rig.pool.submit(text(1)), rig.pool.submit(text(1))
    rig.pool.drop(gone)
    rig.gate.set()
    assert set(rig.verdicts(1)) == {stays}
    rig.pool.close()


def test_the_cache_drops_what_was_used_least_recently() -> None:
    rig = Rig(limits=GrammarLimits(cache_bytes=2500))
    rig.gate.set()
    for token in (1, 2, 1, 3, 1, 2):
        rig.pool.submit(text(token))
        rig.verdicts(1)
    assert rig.backend.compiled == ["1", "2", "3", "2"]
    assert rig.pool.state.cached_bytes <= 2500
    rig.pool.close()


def test_a_pool_that_is_closed_in_the_middle_of_a_compilation_joins_its_threads() -> None:
    rig = Rig()
    rig.pool.submit(text(1))
    rig.pool.submit(text(2))
    rig.pool.close()
    assert not _threads()
    rig.pool.close()
