"""The matchers of live requests, behind handles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.grammar.backend import TokenMatcher
from tokenspeed.plane.grammar import GrammarRow, MatcherState
from tokenspeed.plane.messages import Int32Array


@attrs.define(eq=False)
class Matching:
    """One request's matcher. Writer: whoever advances it (GR-9).

    Attributes:
        tokens: those it has accepted.
        filled_s: processor time of the next token's mask.
    """

    matcher: TokenMatcher
    tokens: list[int] = attrs.field(factory=list[int])
    over: bool = False
    filled_s: float = 0.0

    def accept(self, token: int) -> MatcherState:
        if not self.matcher.accept(token):
            self.over = True
            return MatcherState.REFUSED
        self.tokens.append(token)
        self.over = self.matcher.ended()
        return MatcherState.ENDED if self.over else MatcherState.OPEN


@attrs.define(eq=False)
class MatcherTable:
    """Writers: compiling threads add, the control thread removes; each is one step of a dict."""

    live: dict[int, Matching] = attrs.field(factory=dict[int, Matching])


@attrs.frozen(kw_only=True, eq=False)
class Matchers:
    """`plane.grammar.GrammarMatchers`.

    A matcher that is over fills no masks: what a row of it samples is surplus, or ends the request. So is one
    that costs too much: with an ambiguous grammar each further token can take longer than the one before, and
    a batch waits for all its rows. It is the time of the processor that counts, whatever else runs here.

    Attributes:
        token_s: processor time that one token may take, its mask included.
    """

    vocab_size: int
    token_s: float = 0.05
    cpu_s: Callable[[], float] = time.thread_time
    table: MatcherTable = attrs.field(factory=MatcherTable)

    @property
    def words(self) -> int:
        return (self.vocab_size + 31) // 32

    def add(self, handle: int, matcher: TokenMatcher) -> None:
        self.table.live[handle] = Matching(matcher)

    def remove(self, handle: int) -> None:
        self.table.live.pop(handle, None)

    def fill(self, rows: Sequence[GrammarRow], words: Int32Array) -> None:
        for at, row in enumerate(rows):
            matching = self.table.live.get(row.handle)
            if matching is None or matching.over:
                words[at] = -1
                continue
            if len(matching.tokens) != row.produced:
                raise InvariantBroken(
                    "a matcher and its request have different tokens",
                    handle=row.handle,
                    accepted=len(matching.tokens),
                    produced=row.produced,
                )
            begun_s = self.cpu_s()
            matching.matcher.fill(words, at)
            matching.filled_s = self.cpu_s() - begun_s

    def bring(self, handle: int, tokens: Sequence[int]) -> None:
        matching = self.table.live.get(handle)
        if matching is None or matching.tokens == list(tokens):
            return
        matching.matcher.reset()
        matching.tokens.clear()
        matching.over = False
        for token in tokens:
            if matching.accept(token) is MatcherState.REFUSED:
                raise InvariantBroken("an output that its grammar does not accept", handle=handle, token=token)

    def accept(self, handles: Sequence[int], tokens: Sequence[int]) -> tuple[MatcherState, ...]:
        return tuple(self._advance(handle, token) for handle, token in zip(handles, tokens, strict=True))

    def _advance(self, handle: int, token: int) -> MatcherState:
        matching = self.table.live.get(handle)
        if matching is None or matching.over:
            return MatcherState.OPEN
        begun_s = self.cpu_s()
        state = matching.accept(token)
        if state is MatcherState.OPEN and matching.filled_s + self.cpu_s() - begun_s > self.token_s:
            matching.over = True
            return MatcherState.COSTLY
        return state
