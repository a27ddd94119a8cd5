"""The mark between start-up, when kernels may be compiled, and serving, when they may not.

Code that can compile asks `JitMonitor.is_serving` and takes a path without compilation once it is
True. The CPU backend compiles nothing, so today the mark is all there is: no source of compilations
reports here, and `ForwardResult.jit_compiles` is 0.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class ServingMark:
    """Writer: JitMonitor. Read from any thread; goes from False to True once."""

    serving: bool = False


@attrs.frozen(eq=False)
class JitMonitor:
    """Made before anything of the device side is built (DP-73)."""

    mark: ServingMark = attrs.field(factory=ServingMark)

    def enter_serving(self) -> None:
        """Start-up is over; what compiles from here on stalls a round."""
        self.mark.serving = True

    def is_serving(self) -> bool:
        return self.mark.serving
