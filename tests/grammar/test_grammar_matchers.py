"""Matchers behind handles: what a token may cost."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from tokenspeed.grammar.backend import XgrammarBackend, load_backend
from tokenspeed.grammar.matchers import Matchers
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarRow, GrammarSource, MatcherState
from tokenspeed.plane.messages import Int32Array

BYTES = Vocabulary(tokens=(*(bytes([one]) for one in range(256)), b""), stops=(256,))
MANY = 2000
"""Tokens by which each of the ambiguous grammars below has become too costly on any machine."""


@attrs.define(eq=False)
class Clock:
    at_s: float = 0.0

    def __call__(self) -> float:
        return self.at_s


@attrs.define(eq=False)
class Slow:
    """Takes `fill_s` for a mask and `accept_s` for a token, and ends after `length` tokens."""

    clock: Clock
    fill_s: float = 0.0
    accept_s: float = 0.0
    length: int = 100
    taken: int = 0

    def fill(self, words: Int32Array, row: int) -> None:
        self.clock.at_s += self.fill_s
        words[row] = 7

    def accept(self, token: int) -> bool:
        self.clock.at_s += self.accept_s
        self.taken += 1
        return True

    def ended(self) -> bool:
        return self.taken == self.length

    def reset(self) -> None:
        self.taken = 0


def step(matchers: Matchers, handles: tuple[int, ...], produced: int, token: int = 1) -> tuple[MatcherState, ...]:
    words = np.zeros((len(handles), matchers.words), dtype=np.int32)
    matchers.fill([GrammarRow(index=i, handle=one, produced=produced) for i, one in enumerate(handles)], words)
    return matchers.accept(handles, (token,) * len(handles))


def test_a_token_that_costs_too_much_with_its_mask_ends_its_own_row_and_its_matcher_is_left_alone() -> None:
    clock = Clock()
    matchers = Matchers(vocab_size=32, token_s=1.0, cpu_s=clock)
    slow, fast = Slow(clock, fill_s=0.6, accept_s=0.6), Slow(clock, fill_s=0.2, accept_s=0.2)
    matchers.add(1, slow)
    matchers.add(2, fast)
    assert step(matchers, (1, 2), 0) == (MatcherState.COSTLY, MatcherState.OPEN)
    assert step(matchers, (1, 2), 1) == (MatcherState.OPEN, MatcherState.OPEN)
    assert (slow.taken, fast.taken) == (1, 2)


def test_a_costly_token_that_ends_its_grammar_ends_it_well() -> None:
    clock = Clock()
    matchers = Matchers(vocab_size=32, token_s=1.0, cpu_s=clock)
    matchers.add(1, Slow(clock, accept_s=5.0, length=1))
    assert step(matchers, (1,), 0) == (MatcherState.ENDED,)


@pytest.fixture(scope="module")
def backend() -> XgrammarBackend:
    return load_backend(BYTES, whitespace=2)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((a{1,50}){1,50}){1,50}"),
        ("ebnf", 'root ::= ("a" | root){1,1000}'),
        ("ebnf", 'root ::= ((("a"){1,1000}){1,1000}){1,1000}'),
    ],
)
def test_a_grammar_of_many_readings_is_given_up_before_it_holds_up_a_batch(
    backend: XgrammarBackend, kind: str, text: str
) -> None:
    matchers = Matchers(vocab_size=257, token_s=0.005)
    matchers.add(1, backend.compile(GrammarSource(kind=kind, text=text)).matcher())
    states = (step(matchers, (1,), produced, ord("a"))[0] for produced in range(MANY))
    assert next(state for state in states if state is not MatcherState.OPEN) is MatcherState.COSTLY
