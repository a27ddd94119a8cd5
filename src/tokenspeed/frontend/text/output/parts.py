"""Pieces of a model's text by what they mean, and the parser's protocol."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs


class PartKind(enum.Enum):
    """What a piece of text is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    ARGUMENTS = "arguments"


@attrs.frozen
class Part:
    """A piece of output; pieces of one kind and call are to be appended to each other.

    Attributes:
        text: the text; of a CALL the function's name, of ARGUMENTS a piece of their JSON.
        call: which of the sequence's calls, from 0.
    """

    kind: PartKind
    text: str
    call: int = 0


class OutputParser(Protocol):
    """Reads one sequence's text; keeps what it cannot place yet, and never takes back what it returned."""

    def push(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]:
        """The text is over: what was kept."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class PlainText:
    """The parser of a model, or a request, without reasoning and tools."""

    def push(self, text: str) -> list[Part]:
        return texts(text)

    def flush(self) -> list[Part]:
        return []


def texts(text: str, kind: PartKind = PartKind.TEXT) -> list[Part]:
    """`text` as parts: none if it is empty."""
    return [Part(kind, text)] if text else []


@attrs.frozen
class Found:
    """Where a tag is in a text.

    Attributes:
        before: text that is certainly before it, or no part of it.
        tag: the tag, or "" if it is not (wholly) there.
        rest: after the tag; without one, what may be its beginning.
    """

    before: str
    tag: str
    rest: str


def find_first(text: str, tags: Sequence[str]) -> Found:
    """The first of `tags` in `text`; of several that start together, the longest."""
    places = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    if places:
        at, _, tag = min(places)
        return Found(text[:at], tag, text[at + len(tag) :])
    longest = max(map(len, tags), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return Found(text[:-size], "", text[-size:])
    return Found(text, "", "")
