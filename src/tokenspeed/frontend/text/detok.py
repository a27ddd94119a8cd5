"""Token ids to text, as they arrive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class TextDecoder(Protocol):
    """Turns one sequence's ids into text piece by piece."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that is certain after `ids`; never half a character."""
        ...

    def flush(self) -> str:
        """What was held back; the sequence is over."""
        ...
