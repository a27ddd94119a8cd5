"""GET /docs: the document of the API as a page that needs nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}details{border:1px solid #ddd;border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}code{font:13px ui-monospace,monospace}b.m{display:inline-block;width:4.5rem;color:#06c}
table{border-collapse:collapse;width:100%}td,th{text-align:left;border-top:1px solid #eee;padding:.2rem .5rem}
td{vertical-align:top}.t{color:#666}
"""


def docs_page(document: Mapping[str, object]) -> bytes:
    """HTML, made once."""
    return "".join(_page(document)).encode()


def _page(document: Mapping[str, object]) -> Iterator[str]:
    paths = _mapping(document.get("paths"))
    schemas = _mapping(_mapping(document.get("components")).get("schemas"))
    title = _text(_mapping(document.get("info")).get("title"))
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title} API</title><style>{STYLE}</style>"
    yield f"<h1>{title} API</h1><p>The same as a document for programs: <a href=openapi.json>openapi.json</a>.</p>"
    for path, operations in paths.items():
        for method, operation in _mapping(operations).items():
            yield from _operation(path, method, _mapping(operation), schemas)
    yield "</html>"


def _operation(path: str, method: str, operation: Mapping[str, object], schemas: Mapping[str, object]) -> Iterator[str]:
    summary = f"<b class=m>{method.upper()}</b> <code>{_text(path)}</code> {_text(operation.get('summary'))}"
    yield f"<details><summary>{summary}</summary>"
    content = _mapping(_mapping(operation.get("requestBody")).get("content"))
    given = _mapping(_mapping(content.get("application/json")).get("schema"))
    if given:
        schema = _resolved(given, schemas)
        needed = schema.get("required")
        yield "<table><tr><th>field<th>what it may be"
        for name, field in _mapping(schema.get("properties")).items():
            mark = " *" if isinstance(needed, list) and name in needed else ""
            yield f"<tr><td><code>{_text(name)}</code>{mark}<td class=t>{_text(_words(_mapping(field)))}"
        yield "</table>"
    yield f"<p class=t>answers: {', '.join(_mapping(operation.get('responses')))}</p></details>"


def _resolved(schema: Mapping[str, object], schemas: Mapping[str, object]) -> Mapping[str, object]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return _mapping(schemas.get(name)) if name else schema


BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "maxItems": "at most {} items",
    "pattern": "like {}",
    "default": "default {}",
}


def _words(schema: Mapping[str, object]) -> str:
    options = schema.get("anyOf")
    parts = []
    if isinstance(options, list):
        parts.append(" or ".join(_words(_mapping(one)) for one in options))
    elif "$ref" in schema:
        parts.append(str(schema["$ref"]).rpartition("/")[2])
    elif "enum" in schema:
        parts.append(f"one of {schema['enum']}")
    else:
        parts.append(str(schema.get("type", "any value")))
    if "items" in schema:
        parts.append(f"of {_words(_mapping(schema['items']))}")
    parts += [text.format(schema[name]) for name, text in BOUNDS.items() if name in schema]
    return ", ".join(parts)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return html.escape(str(value or ""))
