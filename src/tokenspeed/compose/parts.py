"""Every part of a rank that can be replaced: its name, the protocol it must fit, and where it goes.

`rank_engine(settings, name=object)` and `ControlContainer(name=object)` check what they are given
against this table, because the container library checks neither names nor shapes: a wrong name, or an
object whose methods do not fit, fails when the engine is built, with the part's name.
"""

from __future__ import annotations

import difflib
import enum
import inspect
from collections.abc import Iterable, Mapping

import attrs
from dependency_injector import providers

from tokenspeed.control.epd import Epd
from tokenspeed.control.eplb import Eplb
from tokenspeed.control.grammar import GrammarQueue
from tokenspeed.control.history import History
from tokenspeed.control.l3 import L3
from tokenspeed.control.pd import Pd
from tokenspeed.control.pipeline import Pipeline
from tokenspeed.errors import SettingsError
from tokenspeed.plane.ports import (
    Clock,
    DataPlane,
    FrontendLink,
    KvEventSink,
    Mesh,
    Meter,
    Scheduler,
    SchedulingPolicy,
    Wakeup,
)
from tokenspeed.plane.storage import StorageBackend
from tokenspeed.plane.traces import Tracer


class Side(enum.Enum):
    """Which half of the rank takes the part; RANK: something between them."""

    CONTROL = "control"
    DEVICE = "device"
    RANK = "rank"


@attrs.frozen
class Part:
    """One replaceable part.

    Attributes:
        protocol: what the object must fit; None for device parts, whose protocols only the device
            side can import (`compose.engine` checks them).
    """

    name: str
    side: Side
    protocol: type | None
    what: str


PARTS: tuple[Part, ...] = (
    Part("policy", Side.CONTROL, SchedulingPolicy, "order of the waiting queue"),
    Part("scheduler", Side.CONTROL, Scheduler, "the whole planner"),
    Part("kv_sink", Side.CONTROL, KvEventSink, "receiver of cache events"),
    Part("meter", Side.CONTROL, Meter, "receiver of iteration metrics"),
    Part("tracer", Side.CONTROL, Tracer, "receiver of the spans of ended requests"),
    Part("clock", Side.CONTROL, Clock, "time as the loop sees it"),
    Part("wakeup", Side.CONTROL, Wakeup, "what an idle loop blocks on"),
    Part("mesh", Side.CONTROL, Mesh, "control collectives between ranks"),
    Part("grammar", Side.CONTROL, GrammarQueue, "admission of constrained requests"),
    Part("epd", Side.CONTROL, Epd, "staging for remote encoders"),
    Part("l3", Side.CONTROL, L3, "agreement on storage"),
    Part("storage", Side.RANK, StorageBackend, "store of KV pages, with storage.backend: part"),
    Part("pd", Side.CONTROL, Pd, "transfers between prefill and decode nodes"),
    Part("eplb", Side.CONTROL, Eplb, "timing of expert rebalances"),
    Part("history", Side.CONTROL, History, "token-history seeds"),
    Part("pipeline", Side.CONTROL, Pipeline, "adoption of the last stage's results"),
    Part("sampler", Side.DEVICE, None, "logits to tokens: a factory, see device.parts.SamplerFactory"),
    Part("model", Side.DEVICE, None, "weights to a forward step: a factory, see device.parts.ModelFactory"),
)

ENDS: tuple[Part, ...] = (
    Part("plane", Side.CONTROL, DataPlane, "the device side"),
    Part("frontend", Side.CONTROL, FrontendLink, "the engine's end of the frontend wire"),
)
"""What a control plane needs beside its settings and specs."""


@attrs.frozen(kw_only=True)
class ChosenParts:
    control: Mapping[str, object]
    device: Mapping[str, object]
    rank: Mapping[str, object]


def check_parts(given: Mapping[str, object]) -> ChosenParts:
    """Sort replacements by side.

    Raises: SettingsError: a name that is no part, or an object that does not fit its protocol.
    """
    known = {part.name: part for part in PARTS}
    sides: dict[Side, dict[str, object]] = {side: {} for side in Side}
    for name, value in given.items():
        _check_name(name, known)
        part = known[name]
        if part.protocol is not None:
            check_part(name, value, part.protocol)
        sides[part.side][name] = value
    return ChosenParts(control=sides[Side.CONTROL], device=sides[Side.DEVICE], rank=sides[Side.RANK])


def check_wiring(given: Mapping[str, object], known: Iterable[str]) -> None:
    """What a control plane is put together from.

    Args:
        known: the names that there are.
    Raises: SettingsError: another name, or an object that does not fit its protocol.
    """
    names = tuple(known)
    protocols = {part.name: part.protocol for part in (*PARTS, *ENDS)}
    for name, value in given.items():
        _check_name(name, names)
        if (protocol := protocols.get(name)) is not None and not isinstance(value, providers.Provider):
            check_part(name, value, protocol)


def check_part(name: str, value: object, protocol: type) -> None:
    """Raises: SettingsError: `value` does not fit."""
    if fault := misfit(value, protocol):
        raise SettingsError(f"part {name!r} does not fit {protocol.__name__}: {fault}")


def _check_name(name: str, known: Iterable[str]) -> None:
    names = tuple(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"parts are {', '.join(names)}"
        raise SettingsError(f"no part is called {name!r}; {hint}")


def misfit(value: object, protocol: type) -> str:
    """Why `value` cannot stand in for `protocol`, or "".

    Looks at every public member, and at a call of the value itself where the protocol has one: there at
    all, callable where the protocol has a method, and callable with the protocol's own parameters.
    """
    for name, member in vars(protocol).items():
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(member, property):
            if fault := _no_value(value, name):
                return fault
            continue
        # A class has a `__call__` of its metaclass, whose parameters say nothing.
        mine = value if name == "__call__" and callable(value) else getattr(value, name, None)
        if mine is None:
            return f"{type(value).__name__} has no {name}"
        if not inspect.isfunction(member):
            continue
        if not callable(mine):
            return f"{name} is not a method"
        wanted = [p for p in inspect.signature(member).parameters.values() if p.name != "self"]
        try:
            signature = inspect.signature(mine)
            signature.bind(
                *(None for p in wanted if p.kind is not inspect.Parameter.KEYWORD_ONLY),
                **{p.name: None for p in wanted if p.kind is inspect.Parameter.KEYWORD_ONLY},
            )
        except TypeError as fault:
            shown = ", ".join(str(p.name) for p in wanted)
            return f"{name}({shown}) cannot be called: {fault}"
    return ""


def _no_value(value: object, name: str) -> str:
    """Why `value` has no attribute `name` to be read, or "". A property is not read: that is its user's to do."""
    found = inspect.getattr_static(value, name, None)
    if found is None and not hasattr(value, name):
        return f"{type(value).__name__} has no {name}"
    return f"{name} is a method, not a value" if inspect.isfunction(found) else ""
