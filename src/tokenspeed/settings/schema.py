"""The settings tree for machines: JSON schema, and plain values."""

from __future__ import annotations

import enum
import typing

import attrs

from tokenspeed.settings.expected import bounds
from tokenspeed.settings.keys import Key, alternatives, keys, sections
from tokenspeed.settings.model import Settings

UNITS: tuple[tuple[str, str], ...] = (("_s", "seconds"), ("_gib", "GiB"), ("_mib", "MiB"), ("_tokens", "tokens"))
"""Suffix of a key's name, and the unit it stands for."""

TYPES: dict[object, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def schema(root: type = Settings) -> dict[str, object]:
    """JSON schema (draft 2020-12) of a settings file: types, bounds, defaults, help and units."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tokenspeed settings",
        **_object(root, ()),
    }


def plain(settings: Settings) -> dict[str, dict[str, object]]:
    """Resolved values by section, as a settings file would have them; secrets are hidden."""
    tree: dict[str, dict[str, object]] = {}
    for key in keys(Settings):
        tree.setdefault(key.path[0], {})[".".join(key.path[1:])] = plain_value(settings, key)
    return tree


def plain_value(settings: object, key: Key) -> object:
    value = settings
    for step in key.path:
        value = getattr(value, step)
    if key.secret and value is not None:
        return "***"
    return _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def unit_of(name: str) -> str | None:
    """The unit that a key's name carries."""
    return next((unit for suffix, unit in UNITS if name.endswith(suffix)), None)


def _object(cls: type, path: tuple[str, ...]) -> dict[str, object]:
    inner = dict(sections(cls))
    properties: dict[str, object] = {}
    own = {key.path[0]: key for key in keys(cls) if len(key.path) == 1}
    for field in attrs.fields(cls):
        below = inner.get((field.name,))
        properties[field.name] = _object(below, (*path, field.name)) if below else _leaf(own[field.name])
    return {
        "type": "object",
        "description": (cls.__doc__ or "").split("\n")[0],
        "additionalProperties": False,
        "properties": properties,
    }


def _leaf(key: Key) -> dict[str, object]:
    kinds = alternatives(key.kind)
    found: dict[str, object] = {}
    choice = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)), None)
    if choice is not None:
        found["enum"] = [member.value for member in choice] + ([None] if key.nullable else [])
    else:
        names = [_type(kind) for kind in kinds]
        found["type"] = names[0] if len(names) == 1 else names
        found.update(_items(kinds[0]))
    found.update(bounds(key.validator))
    default = key.default
    if default is not attrs.NOTHING and not isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        found["default"] = _plain(default)
    if key.help:
        found["description"] = key.help
    unit = unit_of(key.path[-1])
    if unit:
        found["x-unit"] = unit
    return found


def _items(kind: object) -> dict[str, object]:
    """Of ``tuple[Choice, ...]``, the choices."""
    item = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
    if isinstance(item, type) and issubclass(item, enum.Enum):
        return {"items": {"enum": [member.value for member in item]}}
    return {}


def _type(kind: object) -> str:
    return "array" if typing.get_origin(kind) is tuple else TYPES[kind]
