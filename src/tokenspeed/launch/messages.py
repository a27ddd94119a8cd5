"""Messages between the launcher and its children, over their channel: plain values, pickled.

The launcher unpickles what its children send, so nothing here may come from a module that reaches torch.
"""

from __future__ import annotations

import traceback
from typing import TypeAlias

import attrs

from tokenspeed.checkpoint.sources import ResolvedModel
from tokenspeed.errors import PeerLost, TokenspeedError
from tokenspeed.plane.messages import EngineInfo
from tokenspeed.settings.model import Settings


@attrs.frozen(kw_only=True)
class MetricsPlace:
    """Where ranks leave what they measure.

    Attributes:
        directory: of their files, which the frontend reads at each scrape.
        relay: address of the metrics relay; None: this deployment has none.
    """

    directory: str
    relay: str | None = None


@attrs.frozen(kw_only=True)
class StartRank:
    """Be rank `index` of `count`.

    Attributes:
        handshake: of the foreign frontend; None: the launcher sends it in a `Dial`.
        metrics: None: the rank measures nothing.
    """

    settings: Settings
    resolved: ResolvedModel
    index: int
    count: int
    handshake: str | None = None
    metrics: MetricsPlace | None = None


@attrs.frozen(kw_only=True)
class StartFrontend:
    """Be the frontend of `engines` engines.

    Attributes:
        listener: descriptor of the bound HTTP socket, inherited.
        metrics: where the ranks' numbers are; None: they measure nothing.
    """

    settings: Settings
    resolved: ResolvedModel
    engines: int
    listener: int
    metrics: MetricsPlace | None = None


@attrs.frozen(kw_only=True)
class StartGateway:
    """Start the gateway in place of a frontend of ours; it listens on `port`, which the launcher reserves."""

    settings: Settings
    resolved: ResolvedModel
    port: int


@attrs.frozen(kw_only=True)
class StartRelay:
    """Run the metric outputs, and serve the ranks' numbers on ``metrics.port`` if it is set."""

    settings: Settings
    metrics: MetricsPlace


@attrs.frozen(kw_only=True)
class Dial:
    """Where the frontend's handshake socket is."""

    address: str


@attrs.frozen
class Stop:
    """End in good order; before serving: at once."""


StartMessage: TypeAlias = StartRank | StartFrontend | StartGateway | StartRelay
ToChild: TypeAlias = StartMessage | Dial | Stop


@attrs.frozen(kw_only=True)
class LoadProgress:
    """A step of loading or warm-up, see `checkpoint.progress.Progress`."""

    what: str
    done: int
    total: int


@attrs.frozen(kw_only=True)
class Bound:
    """The frontend has bound the engine wire; ranks may dial `address`."""

    address: str


@attrs.frozen(kw_only=True)
class Ready:
    """The child serves. A rank says what it serves, a frontend where."""

    info: EngineInfo | None = None
    url: str = ""


@attrs.frozen(kw_only=True)
class Failed:
    """The child cannot start or go on, and ends.

    Attributes:
        details: a traceback, for what nobody foresaw; "" where the text says it all.
        consequence: another process went first; its fault is the one to tell last.
    """

    text: str
    details: str = ""
    consequence: bool = False


@attrs.frozen(kw_only=True)
class Exiting:
    """The child ends although nobody asked it to."""

    why: str


FromChild: TypeAlias = LoadProgress | Bound | Ready | Failed | Exiting


def failure_of(exc: BaseException) -> Failed:
    if isinstance(exc, TokenspeedError):
        return Failed(text=str(exc), consequence=isinstance(exc, PeerLost))
    text = f"{type(exc).__name__}: {exc}".removesuffix(": ")
    return Failed(text=text, details="".join(traceback.format_exception(exc)))
