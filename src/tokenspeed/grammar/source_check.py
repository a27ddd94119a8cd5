"""What is wrong with a grammar's text, as far as can be told without compiling it."""

from __future__ import annotations

import json

from tokenspeed.grammar.regex import regex_fault
from tokenspeed.grammar.schema import schema_fault
from tokenspeed.plane.grammar import GrammarSource

MAX_TAG_DEPTH = 64


def source_fault(source: GrammarSource) -> str:
    """Why the text cannot be served, or ""."""
    text = source.text
    if "\x00" in text or any("\ud800" <= sign <= "\udfff" for sign in text):
        return "must be text without NUL and without halves of surrogate pairs"
    match source.kind:
        case "json_schema":
            return schema_fault(text)
        case "regex":
            return regex_fault(text)
        case "structural_tag":
            return _tag_fault(text)
        case _:
            return ""


def _tag_fault(text: str) -> str:
    try:
        root = json.loads(text)
    except RecursionError:
        return "nested too deep"
    except ValueError as no:
        return f"is not JSON: {no}"
    return _inside(root, "$", 0)


def _inside(value: object, path: str, depth: int) -> str:
    """The first fault of a schema or a pattern in a structural tag."""
    if depth > MAX_TAG_DEPTH:
        return f"{path}: nested more than {MAX_TAG_DEPTH} deep"
    if isinstance(value, list):
        faults = (_inside(one, f"{path}[{at}]", depth + 1) for at, one in enumerate(value))
        return next(filter(None, faults), "")
    if not isinstance(value, dict):
        return ""
    if value.get("any_order", False) is not False:
        return f"{path}.any_order: properties would no longer be required; this is not supported"
    for name in ("json_schema", "schema"):
        schema = value.get(name)
        if isinstance(schema, dict | bool) and (fault := schema_fault(json.dumps(schema))):
            return f"{path}.{name}: {fault}"
    if value.get("type") == "regex" and isinstance(pattern := value.get("pattern"), str):
        return f"{path}.pattern: {fault}" if (fault := regex_fault(pattern)) else ""
    inner = ((name, one) for name, one in value.items() if name not in ("json_schema", "schema"))
    return next(filter(None, (_inside(one, f"{path}.{name}", depth + 1) for name, one in inner)), "")
