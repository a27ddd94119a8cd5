"""Constrained decoding as both halves see it: matchers are named by handles and never leave their room.

A handle is a number that is given once. Its matcher has two owners in turn, by the path of the batch
(GR-9): on the eager path the control thread advances it when a forward is committed; on the capturable
path the forward itself does, behind its sampler.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array

GRAMMAR_KINDS: tuple[str, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
"""Fields of `SamplingParams` that hold a grammar."""


@attrs.frozen(kw_only=True)
class GrammarSource:
    """One of :data:`GRAMMAR_KINDS`, and its text."""

    kind: str
    text: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class GrammarRow:
    """A sampled row of a batch that a grammar holds.

    Attributes:
        index: into the batch's rows.
        produced: output tokens before the one to be sampled; its matcher has accepted as many.
        known: those tokens, if the row has been seated since it was last sampled: its matcher is
            brought there first. None: it goes on from where it is.
    """

    index: int
    handle: int
    produced: int
    known: tuple[int, ...] | None = None


@attrs.frozen(kw_only=True)
class GrammarPlan:
    """The constrained rows of a batch.

    Attributes:
        eager: masks are filled before the forward is launched, and the commit advances the matchers.
            False: the forward fills them itself between model and sampler, and advances them (GR-7, GR-8).
    """

    rows: tuple[GrammarRow, ...] = ()
    eager: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)


NO_GRAMMARS = GrammarPlan()


@attrs.frozen(kw_only=True)
class GrammarVerdict:
    """A compilation that ended. `error` is "" if its handle has a matcher now; else `status` goes with it.

    Attributes:
        compile_s: what the compilation took that was made for this handle; None: another's was used, or none.
    """

    handle: int
    error: str = ""
    status: int = 400
    compile_s: float | None = None


class MatcherState(enum.Enum):
    """What a matcher is after a token.

    ENDED: it accepts nothing more. REFUSED: the token was not one of those it allowed. COSTLY: following
    it took longer than one token may; it is not followed any further.
    """

    OPEN = "open"
    ENDED = "ended"
    REFUSED = "refused"
    COSTLY = "costly"


@runtime_checkable
class GrammarCompiler(Protocol):
    """Compiles grammars off the round; control thread only, nothing here blocks."""

    def submit(self, source: GrammarSource) -> int:
        """Compile, or find compiled; a new handle, whose verdict `ready` gives exactly once."""
        ...

    def ready(self) -> tuple[GrammarVerdict, ...]:
        """Compilations that ended since the last call."""
        ...

    def drop(self, handle: int) -> None:
        """Its request is gone: give up the compilation, or forget the matcher. Unknown ones are ignored."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class GrammarMatchers(Protocol):
    """The matchers behind the handles. One thread at a time, in the order that the drain rules give (DO-10).

    A handle whose request is gone is passed over: its row's result is surplus.
    """

    def fill(self, rows: Sequence[GrammarRow], words: Int32Array) -> None:
        """Write which tokens each row may get next; changes no matcher.

        Args:
            words: int32 ``[rows, (vocab + 31) // 32]``, written: bit ``t % 32`` of word ``t // 32`` is
                token t's.
        Raises: InvariantBroken: a matcher has not accepted as many tokens as its row has.
        """
        ...

    def bring(self, handle: int, tokens: Sequence[int]) -> None:
        """Have the matcher accept exactly `tokens` from its start; nothing is done where it has."""
        ...

    def accept(self, handles: Sequence[int], tokens: Sequence[int]) -> tuple[MatcherState, ...]:
        """Have each accept one token."""
        ...

    @property
    def words(self) -> int:
        """int32 words of one mask."""
        ...


@attrs.frozen(eq=False)
class NoCompiler:
    """This engine has no grammar backend; requests with a grammar are refused before they get here."""

    def submit(self, source: GrammarSource) -> int:
        raise InvariantBroken("a grammar for an engine without a backend", kind=source.kind)

    def ready(self) -> tuple[GrammarVerdict, ...]:
        return ()

    def drop(self, handle: int) -> None:
        del handle

    def close(self) -> None:
        return None


@attrs.frozen(eq=False)
class NoMatchers:
    """No grammar holds anything."""

    words: int = 0

    def fill(self, rows: Sequence[GrammarRow], words: Int32Array) -> None:
        del rows, words

    def bring(self, handle: int, tokens: Sequence[int]) -> None:
        del handle, tokens

    def accept(self, handles: Sequence[int], tokens: Sequence[int]) -> tuple[MatcherState, ...]:
        del tokens
        return (MatcherState.OPEN,) * len(handles)
