"""Expert rebalance: counts forwards and says when a rebalance step is due."""

from __future__ import annotations

from typing import Protocol

import attrs


class Eplb(Protocol):
    def note(self, *, forwarded: bool) -> None:
        """This rank did or did not forward in this round; an idle forward is one (CP-6)."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NoExperts:
    """A dense model has no experts to place."""

    def note(self, *, forwarded: bool) -> None:
        return None
