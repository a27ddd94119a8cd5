"""Stop strings, found in text that arrives in pieces.

What is found does not depend on how the text is cut. The occurrence that *starts* first wins; of
several that start together, the shortest, since it is complete first. Text is held back only from
the first place where a stop string may have begun, and only until it is clear that none did.

Source: Aho and Corasick 1975, "Efficient string matching": one step a character, whatever the
number and length of the stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from tokenspeed.errors import RequestError


@attrs.frozen(kw_only=True)
class Emitted:
    """What may be sent on.

    Attributes:
        text: never taken back later.
        matched: the stop string that was found; nothing follows.
        excess: characters after the end of `matched` that came before it was clear that it is the
            first one (an occurrence that had begun earlier might have become complete).
    """

    text: str
    matched: str | None = None
    excess: int = 0


@attrs.frozen(kw_only=True, eq=False)
class StopWords:
    """Stop strings, prepared; shared by all sequences of a request.

    A node is a prefix of some stop string; node 0 is the empty one. Columns by node:

    Attributes:
        steps: the node for the prefix longer by one character.
        fails: the node of the longest proper suffix that is a prefix too.
        depths: length of the prefix.
        founds: the longest stop string that ends with this prefix; "" for none.
        firsts: characters a stop string starts with.
    """

    steps: tuple[Mapping[str, int], ...]
    fails: tuple[int, ...]
    depths: tuple[int, ...]
    founds: tuple[str, ...]
    firsts: frozenset[str]


def prepare_stops(stops: Sequence[str]) -> StopWords:
    """Time and space grow with the characters of `stops` in all.

    Raises: RequestError: an empty stop string.
    """
    steps: list[dict[str, int]] = [{}]
    depths, founds = [0], [""]
    for word in stops:
        if not word:
            raise RequestError("stop has an empty string; one character at least is needed", field="stop")
        node = 0
        for sign in word:
            if sign not in steps[node]:
                steps[node][sign] = len(steps)
                steps.append({})
                depths.append(depths[node] + 1)
                founds.append("")
            node = steps[node][sign]
        founds[node] = word
    fails = [0] * len(steps)
    waiting = deque(steps[0].values())
    while waiting:  # by growing depth: what a node falls back to is finished before it
        node = waiting.popleft()
        founds[node] = founds[node] or founds[fails[node]]
        for sign, child in steps[node].items():
            fails[child] = _step(steps, fails, fails[node], sign)
            waiting.append(child)
    return StopWords(
        steps=tuple(MappingProxyType(one) for one in steps),
        fails=tuple(fails),
        depths=tuple(depths),
        founds=tuple(founds),
        firsts=frozenset(steps[0]),
    )


def _step(steps: Sequence[Mapping[str, int]], fails: Sequence[int], node: int, sign: str) -> int:
    while node and sign not in steps[node]:
        node = fails[node]
    return steps[node].get(sign, 0)


@attrs.define(eq=False)
class MatchState:
    """What one sequence remembers. One writer: its StopMatcher.

    Attributes:
        node: the longest end of the text that may become a stop string.
        held: text that was not emitted; shorter than the longest stop string.
        found: a stop string that is complete, while one that began before it may still become complete.
        found_at: where in `held` it starts.
    """

    node: int = 0
    held: str = ""
    found: str = ""
    found_at: int = 0
    over: bool = False


@attrs.frozen(kw_only=True, eq=False)
class StopMatcher:
    """Looks for stop strings in one sequence's text.

    Text that must not be searched (that of the first `min_tokens` tokens) is simply not pushed.

    Attributes:
        words: see :func:`prepare_stops`.
        include: the stop string that was found stays at the end of the text.
    """

    words: StopWords
    include: bool = False
    state: MatchState = attrs.field(factory=MatchState)

    def push(self, delta: str) -> Emitted:
        """Take more text; after a match, everything is dropped."""
        state, words = self.state, self.words
        if state.over:
            return Emitted(text="")
        if not state.node and words.firsts.isdisjoint(delta):
            return Emitted(text=delta)  # nothing is held, and no stop string starts here
        steps, fails, depths, founds = words.steps, words.fails, words.depths, words.founds
        text, node = state.held + delta, state.node
        for end, sign in enumerate(delta, len(state.held) + 1):
            while node and sign not in steps[node]:
                node = fails[node]
            node = steps[node].get(sign, 0)
            found = founds[node]
            if found and (not state.found or end - len(found) < state.found_at):
                state.found, state.found_at = found, end - len(found)
            if state.found and end - depths[node] >= state.found_at:
                return self._end(text[:end])
        keep_from = len(text) - depths[node]  # what was found starts behind it, else it had been settled above
        state.node, state.held, state.found_at = node, text[keep_from:], state.found_at - keep_from
        return Emitted(text=text[:keep_from])

    def flush(self) -> Emitted:
        """The text is over: emit what was held back, up to a match that was not settled yet."""
        return Emitted(text="") if self.state.over else self._end(self.state.held)

    def _end(self, text: str) -> Emitted:
        """Close with `text` still to emit."""
        state = self.state
        state.over, state.held = True, ""
        if not state.found:
            return Emitted(text=text)
        end = state.found_at + len(state.found)
        shown = text[: end if self.include else state.found_at]
        return Emitted(text=shown, matched=state.found, excess=len(text) - end)
