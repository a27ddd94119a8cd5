"""Reasoning told apart from the answer by the tags that a model's family writes around it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from tokenspeed.frontend.text.output.parts import OutputParser, Part, PartKind, find_first, texts


@attrs.frozen(kw_only=True)
class ReasoningTags:
    """What a family writes around its reasoning.

    Attributes:
        implied: the text starts inside, with or without the opening tag.
    """

    opens: str
    closes: str
    implied: bool = False


REASONING: Mapping[str, ReasoningTags] = MappingProxyType(
    {
        "think": ReasoningTags(opens="<think>", closes="</think>"),
        "qwen3": ReasoningTags(opens="<think>", closes="</think>"),
        "deepseek_r1": ReasoningTags(opens="<think>", closes="</think>", implied=True),
        "mistral": ReasoningTags(opens="[THINK]", closes="[/THINK]"),
        "seed": ReasoningTags(opens="<seed:think>", closes="</seed:think>"),
    }
)
"""By the name of the setting ``server.reasoning_parser``."""


@attrs.define(eq=False)
class ReasoningState:
    """Writer: ReasoningParser.

    Attributes:
        began: text came, or the opening tag is behind us.
        trim: white space is dropped until other text comes.
    """

    inside: bool
    began: bool = False
    closed: bool = False
    trim: bool = True
    kept: str = ""


@attrs.frozen(kw_only=True, eq=False)
class ReasoningParser:
    """One stretch of reasoning at the beginning; the text after it goes to `answer`.

    White space around the reasoning belongs to the tags and is dropped.
    """

    tags: ReasoningTags
    answer: OutputParser
    state: ReasoningState

    def push(self, text: str) -> list[Part]:
        state = self.state
        text, state.kept = state.kept + text, ""
        if not state.began:
            shown = text.lstrip()
            if self.tags.opens.startswith(shown) and shown != self.tags.opens:
                state.kept = text  # may become the opening tag
                return []
            state.began = True
            if shown.startswith(self.tags.opens):
                state.inside, text = True, shown.removeprefix(self.tags.opens)
        return self._inside(text) if state.inside else self._after(text)

    def flush(self) -> list[Part]:
        state = self.state
        kept, state.kept = state.kept, ""
        if state.inside:
            return [*texts(kept.rstrip(), PartKind.REASONING), *self.answer.flush()]
        return [*(self.answer.push(kept) if kept else []), *self.answer.flush()]

    def _inside(self, text: str) -> list[Part]:
        state = self.state
        found = find_first(text, (self.tags.closes,))
        shown = found.before.lstrip() if state.trim else found.before
        state.trim = state.trim and not shown
        if found.tag:
            state.inside, state.closed, state.trim = False, True, True
            return [*texts(shown.rstrip(), PartKind.REASONING), *self._after(found.rest)]
        bare = shown.rstrip()
        state.kept = shown[len(bare) :] + found.rest
        return texts(bare, PartKind.REASONING)

    def _after(self, text: str) -> list[Part]:
        state = self.state
        if state.closed and state.trim:
            text = text.lstrip()
            state.trim = not text
        return self.answer.push(text) if text else []


def reasoning_parser(tags: ReasoningTags, answer: OutputParser, *, opened: bool) -> ReasoningParser:
    """A parser for one sequence.

    Args:
        opened: the prompt ended inside the reasoning.
    """
    inside = opened or tags.implied
    return ReasoningParser(tags=tags, answer=answer, state=ReasoningState(inside=inside))


def reasoning_tokens(pieces: Sequence[bytes], tags: ReasoningTags, *, opened: bool) -> int:
    """How many of an output's tokens, whose bytes are `pieces`, are reasoning, its tags among them."""
    text = b"".join(pieces)
    if not (opened or tags.implied or text.lstrip().startswith(tags.opens.encode())):
        return 0
    closed = text.find(tags.closes.encode())
    if closed < 0:
        return len(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    return bisect.bisect_left(ends, closed + len(tags.closes.encode())) + 1
