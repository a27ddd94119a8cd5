"""Prefill/decode disaggregation as the loop sees it: transfers started and polled, events returned."""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.plane.results import SchedulerEvent


class Pd(Protocol):
    @property
    def role(self) -> str:
        """What this engine is in a pair: ``prefill`` or ``decode``; ``plain`` without one."""
        ...

    def started(self, rows: tuple[int, ...]) -> None:
        """These were accepted by the scheduler: their transfers may begin (IS-24)."""
        ...

    def poll(self) -> tuple[SchedulerEvent, ...]:
        """Transfers that progressed since the last round, as events for the tail advance (RA-48)."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NoPeer:
    """An engine that prefills and decodes by itself."""

    @property
    def role(self) -> str:
        return "plain"

    def started(self, rows: tuple[int, ...]) -> None:
        return None

    def poll(self) -> tuple[SchedulerEvent, ...]:
        return ()
