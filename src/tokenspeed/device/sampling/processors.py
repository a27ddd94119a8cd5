"""Logits processors of other packages: registered by name, seated and released with their requests.

A request names the processors it wants; the settings say which there are. Slots do not move, so a
request's processor state is added at its seat and removed at its release, both here and nowhere else.
What a processor raises ends the request that used it and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import attrs

from tokenspeed.device.sampling.draw import Float32Array
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import Seat

log = logging.getLogger("tokenspeed.sampling")


@runtime_checkable
class RowProcessor(Protocol):
    """One request's processor. Jobs of the exec stream only."""

    def __call__(self, logits: Float32Array, position: int) -> None:
        """Change the row's logits, float32 ``[vocab]``, in place; `position` is the new token's."""
        ...

    def drew(self, token: int) -> None:
        """The token that came of it."""
        ...


@runtime_checkable
class LogitsProcessor(Protocol):
    """A registered processor: makes one `RowProcessor` for each request that names it."""

    def __call__(self, *, argument: str, history: Int32Array, prompt_len: int, vocab_size: int) -> RowProcessor:
        """A request takes a slot, for the first time or again.

        Args:
            argument: what the request gave, as JSON text.
            history: int32, its tokens so far; the first `prompt_len` are the prompt.
        """
        ...


NO_PROCESSORS: Mapping[str, LogitsProcessor] = MappingProxyType({})


@attrs.define(eq=False)
class SeatedProcessors:
    """Writer: Processors. By slot; `broken` are slots whose request can get no token any more."""

    rows: dict[int, tuple[RowProcessor, ...]] = attrs.field(factory=dict[int, tuple[RowProcessor, ...]])
    broken: set[int] = attrs.field(factory=set[int])


@attrs.frozen(kw_only=True, eq=False)
class Processors:
    """The processors of all slots. One sampler uses it."""

    registered: Mapping[str, LogitsProcessor] = NO_PROCESSORS
    vocab_size: int
    seated: SeatedProcessors = attrs.field(factory=SeatedProcessors)

    def seat(self, seat: Seat) -> None:
        self.release(seat.slot)
        wanted = seat.sampling.processors
        if not wanted:
            return
        try:
            self.seated.rows[seat.slot] = tuple(
                self.registered[name](
                    argument=argument,
                    history=seat.history,
                    prompt_len=seat.prompt_len,
                    vocab_size=self.vocab_size,
                )
                for name, argument in wanted
            )
        except Exception as error:
            self._break(seat.slot, "at its start", error)

    def release(self, slot: int) -> None:
        self.seated.rows.pop(slot, None)
        self.seated.broken.discard(slot)

    def uses(self, slot: int) -> bool:
        return slot in self.seated.rows or slot in self.seated.broken

    def apply(self, logits: Float32Array, slot: int, position: int) -> bool:
        """False: a processor of this slot has failed, and `logits` mean nothing."""
        for processor in self.seated.rows.get(slot, ()):
            try:
                processor(logits, position)
            except Exception as error:
                self._break(slot, f"at position {position}", error)
        return slot not in self.seated.broken

    def drew(self, slot: int, token: int) -> None:
        for processor in self.seated.rows.get(slot, ()):
            try:
                processor.drew(token)
            except Exception as error:
                self._break(slot, f"when it was told of token {token}", error)

    def _break(self, slot: int, when: str, error: Exception) -> None:
        """The row's next token is none, which ends the request (OL-6)."""
        log.error("a logits processor failed %s (slot %d); its request ends", when, slot, exc_info=error)
        self.seated.rows.pop(slot, None)
        self.seated.broken.add(slot)
