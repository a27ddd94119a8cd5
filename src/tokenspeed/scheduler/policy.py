"""Orders of the waiting queue."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True, eq=False)
class Fcfs:
    """First come, first served."""

    def key(self, *, order: int, priority: int, prompt_len: int, waited_rounds: int) -> tuple[float, ...]:
        del priority, prompt_len, waited_rounds
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

    def key(self, *, order: int, priority: int, prompt_len: int, waited_rounds: int) -> tuple[float, ...]:
        del prompt_len
        if waited_rounds >= self.patience_rounds:
            return (0, 0, order)
        return (1, priority - waited_rounds // self.rounds_per_level, order)
