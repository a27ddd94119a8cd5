"""Keywords and types of JSON Schema as far as grammars know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

ANNOTATIONS: frozenset[str] = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$comment", "$id", "id", "discriminator", "markdownDescription", "contentMediaType"),
        *("contentEncoding", "externalDocs", "strict"),
    }
)
"""Keywords that assert nothing of a value."""

OTHER_NAMES = ("additionalProperties", "unevaluatedProperties")
"""Keywords about properties that no other keyword names."""

OLD_DRAFTS: frozenset[str] = frozenset({"draft-03", "draft-04", "draft-06", "draft-07", "2019-09"})
"""Versions of the standard that do not know prefixItems."""

DEFINITIONS: frozenset[str] = frozenset({"$defs", "definitions"})

BY_TYPE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "object": frozenset(
            {
                *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
                *("propertyNames", "minProperties", "maxProperties"),
            }
        ),
        "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"}),
        "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
        "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    }
)
"""Keywords that a grammar obeys, by the type of value they are about."""

IMPLY: Mapping[str, frozenset[str]] = MappingProxyType(
    {"object": frozenset({"properties"}), "array": frozenset({"items", "prefixItems"})}
)
"""Keywords that stand for a type where a schema names none."""

TYPES: frozenset[str] = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

FORMATS: frozenset[str] = frozenset({"date", "time", "date-time", "email", "ipv4", "uuid", "uri", "hostname"})


class SchemaFault(Exception):
    """Where in the schema, and what is wrong there."""


def shown(value: object) -> str:
    """`value` for a message, not longer than one line has room for."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def type_names(node: Mapping[str, object], path: str) -> frozenset[str] | None:
    """The types a node allows; None: it does not say.

    Raises: SchemaFault: they are no types.
    """
    given = node.get("type")
    if given is None:
        return None
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(one, str) and one in TYPES for one in names):
        raise SchemaFault(f"{path}.type: got {shown(given)}, must be of {', '.join(sorted(TYPES))}")
    return frozenset(names)


def value_fits(value: object, kinds: frozenset[str]) -> bool:
    """Whether `value` is of one of these types."""
    return bool(kinds_of(value) & kinds)


def exact(value: object) -> bool:
    """Whether the grammar writes each number in `value` as it is: integers of 64 bits, and floats."""
    match value:
        case list():
            return all(exact(one) for one in value)
        case dict():
            return all(exact(one) for one in value.values())
        case int():
            return -(1 << 63) <= value < 1 << 63
        case _:
            return True


def kinds_of(value: object) -> frozenset[str]:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case None:
            return frozenset({"null"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def disjoint(one: object, other: object, target: Callable[[object], object]) -> bool:
    """Whether it is plain that no value fits both: other types, other values, or a tag that differs.

    Args:
        target: what a subschema's references lead to.
    """
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    first, second = _values(one), _values(other)
    if first is not None and second is not None:
        return not any(a == b and kinds_of(a) & kinds_of(b) for a in first for b in second)
    mine, theirs = _kinds(one), _kinds(other)
    if mine is None or theirs is None:
        return False
    if not mine & theirs:
        return True
    if mine != {"object"} or theirs != {"object"}:
        return False
    return any(_tags_differ(one, other, name, target) for name in _required(one) & _required(other))


def _values(node: Mapping[str, object]) -> list[object] | None:
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _kinds(node: Mapping[str, object]) -> frozenset[str] | None:
    values = _values(node)
    if values is not None:
        return frozenset().union(*(kinds_of(value) for value in values))
    given = node.get("type")
    if given is None:
        return None  # properties alone say nothing of what is no object
    names = frozenset([given] if isinstance(given, str) else given if isinstance(given, list) else [])
    return names | {"number"} if "integer" in names else names


def _required(node: Mapping[str, object]) -> frozenset[str]:
    names = node.get("required")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _tags_differ(
    one: Mapping[str, object], other: Mapping[str, object], name: str, target: Callable[[object], object]
) -> bool:
    tags = []
    for node in (one, other):
        properties = node.get("properties")
        tag = target(properties.get(name)) if isinstance(properties, dict) else None
        values = _values(tag) if isinstance(tag, dict) else None
        if values is None:
            return False
        tags.append(values)
    return not any(value in tags[1] for value in tags[0])
