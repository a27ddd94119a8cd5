"""How long work tells that it advances."""

from __future__ import annotations

from typing import Protocol

import attrs


class Progress(Protocol):
    """Receives progress of one activity after another; called from the thread that does the work."""

    def step(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes or items of `what` are there; `total` is 0 while it is unknown."""
        ...


@attrs.frozen(eq=False)
class NoProgress:
    """Nobody watches."""

    def step(self, what: str, done: int, total: int) -> None:
        return None
