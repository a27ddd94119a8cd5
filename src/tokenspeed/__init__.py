"""tokenspeed: an LLM inference engine as a typed component library.

Importing this package imports no torch; `Engine` is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenspeed.version import __version__ as __version__

if TYPE_CHECKING:
    from tokenspeed.compose.offline import Engine as Engine
    from tokenspeed.frontend.options import SamplingOptions as SamplingOptions

__all__ = ["Engine", "SamplingOptions", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from tokenspeed.compose.offline import Engine

        return Engine
    if name == "SamplingOptions":
        from tokenspeed.frontend.options import SamplingOptions

        return SamplingOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
