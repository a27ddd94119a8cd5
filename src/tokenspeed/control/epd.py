"""Encode disaggregation: requests staged until their embeddings have landed."""

from __future__ import annotations

from typing import Protocol

import attrs


class Epd(Protocol):
    def stage(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Keep those that wait for embeddings; the rest is returned for submission."""
        ...

    def ready(self) -> tuple[int, ...]:
        """Staged requests whose embeddings have landed (RA-11)."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NoEncoder:
    """A text-only engine."""

    def stage(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return rows

    def ready(self) -> tuple[int, ...]:
        return ()
