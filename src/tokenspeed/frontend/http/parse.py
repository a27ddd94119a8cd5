"""From decoded JSON to a request struct, collecting every fault with field, value and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import attrs
import msgspec
from msgspec import inspect

from tokenspeed.frontend.http.body import Decoded
from tokenspeed.frontend.http.errors import faulty
from tokenspeed.frontend.http.schema import NEUTRAL, NEUTRAL_FOR, REFUSED
from tokenspeed.plane.checks import Fault, fault

S = TypeVar("S", bound=msgspec.Struct)

_MISSING = "Object missing required field "
_ENUM = "Invalid enum value "
_PLACE = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


@attrs.frozen(kw_only=True)
class FieldShape:
    """One field: its type for conversion, what it allows in words, whether it must be given.

    Attributes:
        whole: of all numbers it takes integers; 2.0 is one in JSON, and how some languages write it.
    """

    name: str
    kind: object
    allowed: str
    required: bool
    whole: bool


@attrs.frozen(kw_only=True, eq=False)
class Shape(Generic[S]):
    """A request struct, prepared for reading. Immutable; made once for each struct."""

    struct: type[S]
    fields: tuple[FieldShape, ...]

    def read(self, decoded: Decoded) -> S:
        """The request.

        Raises: RequestError: 400 naming every fault.
        """
        given = decoded.fields
        faults = [*self._not_served(given)]
        if not faults and not decoded.odd:
            there = {name: value for name, value in given.items() if value is not None}
            if not any(isinstance(value, float) and not math.isfinite(value) for value in there.values()):
                with suppress(msgspec.ValidationError):  # told below, with all others
                    return msgspec.convert(there, self.struct)
        values: dict[str, object] = {}
        for field in self.fields:
            value = given.get(field.name)
            if value is None:
                if field.required:
                    found = "null" if field.name in given else "leaving it out"
                    faults.append(Fault(field=field.name, value=found, allowed=field.allowed))
                continue
            if field.whole and isinstance(value, float) and value.is_integer():
                value = int(value)
            try:
                values[field.name] = msgspec.convert(value, field.kind)
            except msgspec.ValidationError as exc:
                faults.append(_fault(field, value, str(exc)))
            else:
                if isinstance(value, float) and not math.isfinite(value):
                    faults.append(fault(field.name, value, field.allowed))
        if faults or decoded.odd:
            raise faulty(faults or decoded.odd)
        return self.struct(**values)

    def _not_served(self, given: Mapping[str, object]) -> Iterator[Fault]:
        known = [field.name for field in self.fields]
        for name, value in given.items():
            served = name in known or name not in REFUSED
            if name == "best_of" and value == given.get("n", 1):
                continue  # the best of those that are wanted: all of them
            if not served and value not in NEUTRAL and value not in NEUTRAL_FOR.get(name, ()):
                yield fault(name, value, "it to be left out: this is not supported yet")


def shape_of(struct: type[S]) -> Shape[S]:
    info = inspect.type_info(struct)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{struct!r} is not a struct")
    hints = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return Shape(
        struct=struct,
        fields=tuple(
            FieldShape(
                name=field.encode_name,
                kind=hints[field.name],
                allowed=_words(field.type),
                required=field.required,
                whole=_whole(field.type),
            )
            for field in info.fields
        ),
    )


def _whole(kind: inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(one, inspect.IntType) for one in kinds) and not any(
        isinstance(one, inspect.FloatType) for one in kinds
    )


def _fault(field: FieldShape, value: object, text: str) -> Fault:
    """The converter's error with the value it is about; `text` ends in a JSONPath for nested ones."""
    found = _PLACE.match(text)
    path = found["path"] if found is not None else None
    if not path or path == "$":
        return fault(field.name, value, field.allowed)
    said = found["text"] if found is not None else text
    inner, name = _walk(value, field.name, path)
    said = said.replace("`", "")
    if said.startswith(_MISSING):
        return fault(name, inner, f"an object with a field {said.removeprefix(_MISSING)}")
    if said.startswith(_ENUM):
        said = _choices(inspect.type_info(field.kind), re.findall(r"\.(\w+)", path)) or said
    return fault(name, inner, said.removeprefix("Expected "))


def _choices(kind: inspect.Type, path: Sequence[str]) -> str:
    """The words that `kind` allows at the end of a path of keys; "" if it cannot be followed."""
    match kind:
        case inspect.UnionType(types=types):
            return ", or ".join(filter(None, (_choices(one, path) for one in types)))
        case inspect.ListType(item_type=item):
            return _choices(item, path)
        case inspect.StructType(fields=fields) if path:
            return next((_choices(one.type, path[1:]) for one in fields if one.encode_name == path[0]), "")
        case inspect.LiteralType(values=values) if not path:
            return ", ".join(repr(value) for value in values)
        case _:
            return ""


def _walk(value: object, name: str, path: str) -> tuple[object, str]:
    """The value at `path`, as far as it can be followed: a dict's key is not told."""
    for step in re.findall(r"\[(\d+|\.\.\.)\]|\.(\w+)", path):
        index, key = step
        if key and isinstance(value, dict):
            value, name = value.get(key), f"{name}.{key}"
        elif index.isdigit() and isinstance(value, list) and int(index) < len(value):
            value, name = value[int(index)], f"{name}[{index}]"
        else:
            break
    return value, name


def _words(kind: inspect.Type) -> str:
    """What `kind` allows, for a person."""
    match kind:
        case inspect.UnionType(types=types):
            return ", or ".join(_words(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.IntType(ge=ge, le=le):
            return f"an integer from {ge} to {le}" if ge is not None else "an integer"
        case inspect.FloatType(gt=gt, ge=ge, le=le):
            if gt is not None:
                return f"a number above {gt:g} and up to {le:g}"
            return f"a number from {ge:g} to {le:g}" if ge is not None else "a number"
        case inspect.StrType(min_length=least, max_length=most):
            return f"a string of {least} to {most} characters" if most is not None else "a string"
        case inspect.BoolType():
            return "true or false"
        case inspect.ListType(item_type=item, max_length=most):
            return f"a list of {f'at most {most}' if most is not None else 'items'}, each {_words(item)}"
        case _:
            return "an object"
