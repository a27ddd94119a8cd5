"""Token-history seeds for models that look back at earlier tokens."""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.plane.plan import ExecutionPlan, HistorySeed


class History(Protocol):
    def seeds(self, plan: ExecutionPlan) -> tuple[HistorySeed, ...]:
        """Seeds for the rows that got a new owner in this plan (HS-3)."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NoHistory:
    """Neither target nor draft reads token history, so no rows are kept."""

    def seeds(self, plan: ExecutionPlan) -> tuple[HistorySeed, ...]:
        return ()
