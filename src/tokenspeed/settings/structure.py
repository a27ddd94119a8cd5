"""A layer's plain values to frozen settings, every fault at once."""

from __future__ import annotations

import difflib
import enum
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from types import GenericAlias
from typing import Any, TypeAlias, TypeVar

import attrs
import cattrs
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, override

from tokenspeed.settings.expected import WORDS, bounds, expected, one_of
from tokenspeed.settings.flags import familiar_names
from tokenspeed.settings.keys import Path, nearest
from tokenspeed.settings.scalars import shown

T = TypeVar("T")
Hook: TypeAlias = Callable[[Any, Any], Any]  # cattrs hands any value to any hook

YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def structure(values: Mapping[str, object], into: type[T]) -> T | tuple[tuple[Path, str], ...]:
    """`values` as an `into`, or what is wrong with them: (path, reason) pairs."""
    try:
        return converter().structure(dict(values), into)
    except (BaseValidationError, TypeError, ValueError) as exc:
        return tuple(_reasons(exc, (), into))


def converter() -> cattrs.Converter:
    """No unknown keys, no silent casts, and every attribute's validators are heard.

    A class's own attrs validators would stop at the first that fails and would not say where; here
    each attribute is structured and validated by itself, and cattrs collects what they raise.
    """
    conv = cattrs.Converter()
    for kind in (bool, int, float, str):
        conv.register_structure_hook(kind, _exact)
    conv.register_structure_hook_func(lambda kind: isinstance(kind, type) and issubclass(kind, enum.Enum), _member)
    conv.register_structure_hook_factory(attrs.has, _section)
    conv.register_structure_hook_factory(_is_tuple, _items)
    return conv


def _section(cls: type[Any], conv: cattrs.Converter) -> Hook:
    checked = {field.name: override(struct_hook=_checked(field, conv)) for field in attrs.fields(cls)}
    build = make_dict_structure_fn(cls, conv, _cattrs_forbid_extra_keys=True, **checked)  # type: ignore[arg-type]

    def hook(value: Any, kind: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"expected keys below it, got {shown(value)}")
        return build(value, kind)

    return hook


def _checked(field: attrs.Attribute[Any], conv: cattrs.Converter) -> Hook:
    def hook(value: Any, kind: Any) -> Any:
        try:
            result = conv.structure(value, kind)
            _validate(field, kind, result)
        except (TypeError, ValueError):
            if field.metadata.get("secret"):
                raise ValueError("not usable (the value is not shown)") from None
            raise
        return result

    return hook


def _validate(field: attrs.Attribute[Any], kind: Any, value: Any) -> None:
    """In the words of the reference where attrs' own validators find the fault, else in the validator's."""
    if field.validator is None:
        return
    try:
        field.validator(None, field, value)
    except ValueError:
        if not bounds(field.validator):
            raise
        wanted = expected(kind, field.validator)
        raise ValueError(f"expected {wanted}{';' if ', ' in wanted else ','} got {shown(value)}") from None


def _exact(value: Any, kind: type[Any]) -> Any:
    if type(value) is kind and not (kind is float and not math.isfinite(value)):
        return value
    if kind is float and type(value) is int:
        return float(value)
    hint = ""
    if kind is int and type(value) is float and value.is_integer():
        hint = f"; write {int(value)}"
    elif kind is bool and isinstance(value, str) and value.lower() in YAML_1_1:
        hint = f"; write {YAML_1_1[value.lower()]}"
    elif kind is str and not isinstance(value, (list, dict)):
        hint = "; put it in quotes"
    raise TypeError(f"expected {WORDS[kind]}, got {shown(value)}{hint}")


def _member(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    for member in kind:
        if type(value) is type(member.value) and value == member.value:
            return member
    words = [str(member.value) for member in kind]
    near = difflib.get_close_matches(str(value), words, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"expected {one_of(words)}; got {shown(value)}{hint}")


def _is_tuple(kind: Any) -> bool:
    return bool(typing.get_origin(kind) == tuple)  # noqa: E721 - "is" is never true for mypy here


def _items(kind: Any, conv: cattrs.Converter) -> Hook:
    """`tuple[X, ...]` from a YAML list; other tuples are not settings."""
    items: Any = GenericAlias(list, (typing.get_args(kind)[0],))

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {shown(value)}")
        return tuple(conv.structure(value, items))

    return hook


def _reasons(exc: BaseException, path: Path, root: type) -> Iterator[tuple[Path, str]]:
    for note in getattr(exc, "__notes__", ()):  # cattrs leaves the path here
        if isinstance(note, AttributeValidationNote):
            path = (*path, note.name)
        elif isinstance(note, IterableValidationNote):
            path = (*path, note.index)
    if isinstance(exc, BaseValidationError):
        for inner in exc.exceptions:
            yield from _reasons(inner, path, root)
    elif isinstance(exc, ForbiddenExtraKeysError):
        for key in sorted(map(str, exc.extra_fields)):
            near = nearest(root, (*path, key), familiar_names())
            yield (*path, key), "unknown key" + (f"; did you mean {near}?" if near else "")
    elif isinstance(exc, KeyError):
        yield path, "missing"
    else:
        yield path, str(exc.args[0]) if exc.args else repr(exc)
