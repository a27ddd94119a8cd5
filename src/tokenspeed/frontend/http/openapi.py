"""The OpenAPI document, made from the structs that requests are read with and answers are written from."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
import msgspec

from tokenspeed.frontend.http.access import OPEN_PATHS
from tokenspeed.frontend.http.errors import DOCUMENTED_STATUSES, ErrorBody

NAMES = "#/components/schemas/{name}"


@attrs.frozen(kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    method: str
    summary: str
    takes: type[msgspec.Struct] | None
    gives: type[msgspec.Struct] | None
    statuses: tuple[int, ...] = ()


def openapi_document(
    operations: Sequence[Operation], *, version: str, keyed: bool, always: tuple[int, ...] = ()
) -> dict[str, object]:
    """OpenAPI 3.1.

    Args:
        keyed: an API key is required.
        always: statuses that any operation may answer.
    """
    structs = {kind for op in operations for kind in (op.takes, op.gives) if kind is not None} | {ErrorBody}
    ordered = sorted(structs, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, schema_hook=_any_value, ref_template=NAMES)
    reference = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for op in [attrs.evolve(op, statuses=(*op.statuses, *always)) for op in operations]:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", op.path)
        paths.setdefault(path, {})[op.method.lower()] = _operation(op, reference, keyed=keyed)
    parts: dict[str, object] = {"schemas": components}
    if keyed:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokenspeed", "version": version},
        "paths": paths,
        "components": parts,
    }


def _any_value(kind: type) -> dict[str, object]:
    if kind is not object:
        raise NotImplementedError
    return {"description": "any JSON value"}


def _operation(
    op: Operation, reference: dict[type[msgspec.Struct], dict[str, object]], *, keyed: bool
) -> dict[str, object]:
    answer: dict[str, object] = {"description": "OK"}
    if op.gives is not None:
        content: dict[str, object] = {"application/json": {"schema": reference[op.gives]}}
        if op.takes is not None and "stream" in op.takes.__struct_fields__:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        answer["content"] = content
    else:
        answer["content"] = {"text/plain": {"schema": {"type": "string"}}}
    error = {"description": "Error", "content": {"application/json": {"schema": reference[ErrorBody]}}}
    found: dict[str, object] = {
        "summary": op.summary,
        "responses": {"200": answer, **{str(status): error for status in _statuses(op, keyed=keyed)}},
    }
    if op.takes is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference[op.takes]}}}
    if names := re.findall(r"\{(\w+)(?::path)?\}", op.path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if keyed and op.path not in OPEN_PATHS:
        found["security"] = [{"key": []}]
    return found


def _statuses(op: Operation, *, keyed: bool) -> list[int]:
    """What this operation may answer besides 200."""
    found = [500]
    if op.takes is not None:
        found = [status for status in DOCUMENTED_STATUSES if status not in (401, 403, 405, 409)]
    elif "{" in op.path:
        found.append(404)
    return sorted({*found, *op.statuses, *((401,) if keyed and op.path not in OPEN_PATHS else ())})
