"""Orders of the waiting queue."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True, eq=False)
class Fcfs:
    """First come, first served."""

    @property
    def wants_cached_tokens(self) -> bool:
        return False

    def key(
        self, *, order: int, priority: int, prompt_len: int, waited_rounds: int, cached_tokens: int
    ) -> tuple[float, ...]:
        del priority, prompt_len, waited_rounds, cached_tokens
        return (order,)


@attrs.frozen(kw_only=True, eq=False)
class AgedPriority:
    """Lower `priority` first; waiting raises a request, so that a steady load ahead of it cannot starve it.

    Attributes:
        rounds_per_level: a request gains one level each time it has waited this long.
        patience_rounds: after this long it goes ahead of everything that has waited less, whatever the
            distance in priority.
    """

    rounds_per_level: int = 128
    patience_rounds: int = 4096

    @property
    def wants_cached_tokens(self) -> bool:
        return False

    def key(
        self, *, order: int, priority: int, prompt_len: int, waited_rounds: int, cached_tokens: int
    ) -> tuple[float, ...]:
        del prompt_len, cached_tokens
        if waited_rounds >= self.patience_rounds:
            return (0, 0, order)
        return (1, priority - waited_rounds // self.rounds_per_level, order)


@attrs.frozen(kw_only=True, eq=False)
class LongestPrefixMatch:
    """Requests with more cached prompt tokens first, so that a prefix is used while it is there.

    Attributes:
        patience_rounds: after this long a request goes ahead of everything that has waited less, so that
            a steady load of cached prompts cannot starve one that is not (B-21).
    """

    patience_rounds: int = 512

    @property
    def wants_cached_tokens(self) -> bool:
        return True

    def key(
        self, *, order: int, priority: int, prompt_len: int, waited_rounds: int, cached_tokens: int
    ) -> tuple[float, ...]:
        del priority, prompt_len
        if waited_rounds >= self.patience_rounds:
            return (0, 0, order)
        return (1, -cached_tokens, order)
