"""The text that is compiled for a grammar, where it differs from the one that was asked for.

Objects that name properties are written without others, also where others would be allowed. The compiler
keeps other names apart from those named by their letters, but a name has further spellings: in JSON
``"\\u0061"`` is ``"a"``, and the later of two values counts. An answer without other properties is valid
wherever one with them is, so nothing is lost of what a schema demands.

A pattern gets a last part that is never written. The compiler has two ways with patterns in JSON, and takes the
one that regular expressions alone take where a character is not ASCII's; its other one lets ``a(?:xb+)?c`` match "abc".

Some formats are compiled as patterns, see `grammar.formats`; patterns are spelled out, see
`grammar.regex.spelled_out`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from tokenspeed.grammar.formats import PATTERNS
from tokenspeed.grammar.regex import spelled_out
from tokenspeed.grammar.schema_parts import OTHER_NAMES
from tokenspeed.plane.grammar import GrammarSource

_BY_NAME = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NEVER = "(?:é){0}"
_VALUES = ("const", "enum", "default", "examples", "example")
_IN_TAGS = ("json_schema", "schema")


def compiled_text(source: GrammarSource, *, whitespace: int) -> str:
    """For a source that `source_fault` has passed.

    Args:
        whitespace: between the tokens of JSON inside a structural tag, at most.
    Raises: ValueError: it is not JSON.
    """
    match source.kind:
        case "json_schema":
            return _changed(source.text, _schema)
        case "regex":
            return spelled_out(source.text)
        case "structural_tag":
            return _changed(source.text, partial(_in_tags, whitespace=whitespace))
        case _:
            return source.text


def _changed(text: str, change: Callable[[object], object]) -> str:
    root = json.loads(text)
    made = change(root)
    return text if made == root else json.dumps(made)


def _schema(node: object) -> object:
    if not isinstance(node, dict):
        return node
    made = {name: _keyword(name, value) for name, value in node.items()}
    named = made.get("format")
    if isinstance(named, str) and named in PATTERNS and _is_text(made.get("type")):
        del made["format"]
        made["pattern"] = _in_json(PATTERNS[named])
    if made.get("properties"):
        for name in OTHER_NAMES:
            if made.get(name) in (True, {}):
                del made[name]
    return made


def _in_json(pattern: str) -> str:
    return f"(?:{spelled_out(pattern, quoted=True)}){_NEVER}"


def _is_text(kind: object) -> bool:
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _keyword(name: str, value: object) -> object:
    if name == "pattern" and isinstance(value, str):
        return _in_json(value)
    if name == "patternProperties" and isinstance(value, dict):
        return {_in_json(pattern): _schema(inner) for pattern, inner in value.items()}
    if name in _BY_NAME and isinstance(value, dict):
        return {key: _schema(inner) for key, inner in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [_schema(inner) for inner in value]
    return value if name in _VALUES else _schema(value)


def _in_tags(value: object, *, whitespace: int) -> object:
    """A structural tag with its schemas and regular expressions changed, and its whitespace bounded."""
    if isinstance(value, list):
        return [_in_tags(one, whitespace=whitespace) for one in value]
    if not isinstance(value, dict):
        return value
    made = {
        name: _schema(one) if name in _IN_TAGS else _in_tags(one, whitespace=whitespace) for name, one in value.items()
    }
    if value.get("type") == "json_schema" and "json_schema" in value:
        made["max_whitespace_cnt"] = max(whitespace, 1)  # the compiler knows no less here
    if value.get("type") == "regex" and isinstance(pattern := value.get("pattern"), str):
        made["pattern"] = spelled_out(pattern)
    return made
