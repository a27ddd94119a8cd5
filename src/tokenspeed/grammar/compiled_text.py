"""The text that is compiled for a grammar, where it differs from the one that was asked for.

Objects that name properties are written without others, also where others would be allowed. The compiler
keeps other names apart from those named by their letters, but a name has further spellings: in JSON
``"\\u0061"`` is ``"a"``, and the later of two values counts. An answer without other properties is valid
wherever one with them is, so nothing is lost of what a schema demands.

A dot of a regular expression matches no end of a line, as in ECMA-262; the compiler's matches everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenspeed.grammar.regex import dots_of
from tokenspeed.grammar.schema_parts import OTHER_NAMES
from tokenspeed.plane.grammar import GrammarSource

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "unevaluatedItems", "propertyNames", *OTHER_NAMES)
_IN_TAGS = ("json_schema", "schema")
_DOT = r"[^\n\r\u2028\u2029]"


def compiled_text(source: GrammarSource) -> str:
    """For a source that `source_fault` has passed.

    Raises: ValueError: it is not JSON.
    """
    match source.kind:
        case "json_schema" if any(name in source.text for name in OTHER_NAMES):
            return _changed(source.text, _closed)
        case "regex":
            return _without_dots(source.text)
        case "structural_tag":
            return _changed(source.text, _in_tags)
        case _:
            return source.text


def _changed(text: str, change: Callable[[object], object]) -> str:
    root = json.loads(text)
    made = change(root)
    return text if made == root else json.dumps(made)


def _closed(node: object) -> object:
    if not isinstance(node, dict):
        return node
    made = {name: _keyword(name, value) for name, value in node.items()}
    if made.get("properties"):
        for name in OTHER_NAMES:
            if made.get(name) in (True, {}):
                del made[name]
    return made


def _keyword(name: str, value: object) -> object:
    if name in _BY_NAME and isinstance(value, dict):
        return {key: _closed(inner) for key, inner in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [_closed(inner) for inner in value]
    return _closed(value) if name in _SINGLE else value


def _in_tags(value: object) -> object:
    """A structural tag with its schemas and regular expressions changed."""
    if isinstance(value, list):
        return [_in_tags(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {name: _closed(one) if name in _IN_TAGS else _in_tags(one) for name, one in value.items()}
    if value.get("type") == "regex" and isinstance(pattern := value.get("pattern"), str):
        made["pattern"] = _without_dots(pattern)
    return made


def _without_dots(pattern: str) -> str:
    pieces, at = list[str](), 0
    for dot in dots_of(pattern):
        pieces += [pattern[at:dot], _DOT]
        at = dot + 1
    return "".join([*pieces, pattern[at:]])
