"""tokenspeed: an LLM inference engine as a typed component library.

Importing this package imports no torch; what it exports is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenspeed.version import __version__ as __version__

if TYPE_CHECKING:
    from tokenspeed.compose.offline import Completion as Completion
    from tokenspeed.compose.offline import Engine as Engine
    from tokenspeed.frontend.options import SamplingOptions as SamplingOptions
    from tokenspeed.settings.load import load_settings as load_settings
    from tokenspeed.settings.model import Settings as Settings

__all__ = ["Completion", "Engine", "SamplingOptions", "Settings", "__version__", "load_settings"]

_HOMES = MappingProxyType(
    {
        "Completion": "tokenspeed.compose.offline",
        "Engine": "tokenspeed.compose.offline",
        "SamplingOptions": "tokenspeed.frontend.options",
        "Settings": "tokenspeed.settings.model",
        "load_settings": "tokenspeed.settings.load",
    }
)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
