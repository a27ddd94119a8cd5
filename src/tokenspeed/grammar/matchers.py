"""The matchers of live requests, behind handles."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.grammar.backend import TokenMatcher
from tokenspeed.plane.grammar import GrammarRow, MatcherState
from tokenspeed.plane.messages import Int32Array


@attrs.define(eq=False)
class Matching:
    """One request's matcher. Writer: whoever advances it (GR-9); `tokens` are those it has accepted."""

    matcher: TokenMatcher
    tokens: list[int] = attrs.field(factory=list[int])
    over: bool = False

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

    A matcher that is over fills no masks: what a row of it samples is surplus, or ends the request.
    """

    vocab_size: int
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
            matching.matcher.fill(words, at)

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
        return matching.accept(token)
