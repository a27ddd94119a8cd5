"""Defaults, file, environment and flags to one frozen `Settings`; every fault at once, each where it was made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

import attrs

from tokenspeed.errors import SettingsError
from tokenspeed.settings.keys import Path, keys
from tokenspeed.settings.layers import (
    DEFAULT,
    Assignment,
    Fault,
    Layer,
    Origin,
    Source,
    from_assignments,
    from_environment,
    parse_assignment,
)
from tokenspeed.settings.model import Settings
from tokenspeed.settings.refusals import refused
from tokenspeed.settings.structure import structure
from tokenspeed.settings.yaml_text import from_yaml


@attrs.frozen(kw_only=True)
class Loaded:
    """Resolved settings, and the layers they were made of (later layers win)."""

    settings: Settings
    layers: tuple[Layer, ...] = ()

    def origin_of(self, path: Path) -> Origin:
        """Which layer gave the value of the leaf at `path`."""
        found = [origin for layer in reversed(self.layers) if (origin := layer.origin_of(path)) is not None]
        return found[0] if found else DEFAULT


def load_settings(
    file: str | os.PathLike[str] | None = None,
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings for a program: a YAML file, and ``a.b=c`` assignments that win over it.

    Args:
        environ: where ``TOKENSPEED_SECTION__KEY`` variables are looked up; None: nowhere.
    Raises: SettingsError: every fault, one a line, as ``origin: path: reason``.
    """
    layers = [read_file(file)] if file is not None else []
    if environ is not None:
        layers.append(from_environment(environ, Settings))
    layers.append(from_assignments([parse_assignment(text, Settings) for text in sets], Settings))
    return resolve(layers).settings


def load_text(text: str, *, name: str = "settings.yaml") -> Settings:
    """Settings from YAML text; `name` is what messages call it. Raises: SettingsError."""
    return resolve([from_yaml(text, Settings, name=name)]).settings


def read_file(file: str | os.PathLike[str]) -> Layer:
    """A YAML file as a layer; what keeps it from being read is a fault of that layer."""
    name = os.fspath(file)
    try:
        raw = FilePath(name).read_bytes()
    except OSError as exc:
        origin = Origin(source=Source.FILE, text=name)
        return Layer(faults=(Fault(origin=origin, path=(), text=f"cannot be read: {exc.strerror}"),))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        origin = Origin(source=Source.FILE, text=f"{name}:{line}")
        return Layer(faults=(Fault(origin=origin, path=(), text=f"not UTF-8: {exc.reason}"),))
    return from_yaml(text, Settings, name=name)


def resolve(layers: Sequence[Layer]) -> Loaded:
    """Merge layers (later ones win) over the defaults.

    Each layer is checked by itself too, so that a fault is told although a later layer overrides it.
    Raises: SettingsError.
    """
    faults: list[Fault] = []
    for layer in layers:
        found = structure(layer.tree(), Settings)
        wrong = () if isinstance(found, Settings) else found
        mine = [*layer.faults, *(_fault(path, text, (layer,)) for path, text in wrong)]
        faults.extend(sorted(mine, key=lambda fault: fault.origin.order))
    if not faults:
        merged = structure(_merge(layers), Settings)
        wrong = tuple(refused(merged)) if isinstance(merged, Settings) else merged
        if isinstance(merged, Settings) and not wrong:
            return Loaded(settings=merged, layers=tuple(layers))
        faults.extend(_fault(path, text, layers) for path, text in wrong)
    raise SettingsError("\n".join(str(fault) for fault in faults))


def origins(loaded: Loaded) -> dict[str, Origin]:
    """Dotted key to origin, for every leaf."""
    return {key.dotted: loaded.origin_of(key.path) for key in keys(Settings)}


def _fault(path: Path, text: str, layers: Sequence[Layer]) -> Fault:
    """Blame the last layer that has any part of `path`."""
    found = [origin for layer in reversed(layers) if (origin := layer.nearest_origin(path)) is not None]
    return Fault(origin=found[0] if found else DEFAULT, path=path, text=text)


def _merge(layers: Sequence[Layer]) -> dict[str, object]:
    merged: dict[str, object] = {}
    for layer in layers:
        _overlay(merged, layer.tree())
    return merged


def _overlay(below: dict[str, object], above: Mapping[str, object]) -> None:
    for name, value in above.items():
        inner = below.get(name)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            _overlay(inner, value)
        else:
            below[name] = value


__all__ = ["Assignment", "Loaded", "load_settings", "load_text", "origins", "read_file", "resolve"]
