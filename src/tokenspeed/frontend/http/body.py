"""Reading a request's body and its JSON, strictly and within bounds."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping

import attrs
import msgspec
from starlette.requests import Request

from tokenspeed.errors import RequestError
from tokenspeed.frontend.http.errors import ClientGone, HttpError
from tokenspeed.frontend.limits import encodable
from tokenspeed.frontend.workers import TextWorkers
from tokenspeed.plane.checks import Fault, fault, shown

DRAINED_BYTES = 64 << 20
"""A body that is too large is still read up to here, so that the client gets to the answer."""

UPLOAD_S = 60.0
INLINE_BYTES = 1 << 16
"""A body up to this size is decoded at once: it takes less than the way to a thread and back."""


@attrs.frozen(kw_only=True)
class Decoded:
    """A JSON object.

    Attributes:
        odd: values in it that JSON cannot hold (NaN, infinities, lone surrogates), which the request
            must be refused for if no better fault is found.
    """

    fields: Mapping[str, object]
    odd: tuple[Fault, ...] = ()


async def read_json(request: Request, *, max_bytes: int, workers: TextWorkers | None = None) -> Decoded:
    """The JSON object in the body of `request`.

    Args:
        workers: where a large body is decoded; None: here.

    Raises: RequestError: 400, 408, 413, 415; 429, too much is being decoded; ClientGone.
    """
    _check_type(request)
    body = await _read(request, max_bytes)
    if workers is None or len(body) <= INLINE_BYTES:
        return decode_object(body)
    return await workers.run(len(body), lambda: decode_object(body))


def decode_object(body: bytes) -> Decoded:
    """A JSON object from bytes, with an error that names the place.

    Raises: RequestError; RecursionError: nested deeper than the interpreter's stack allows.
    """
    if not body.strip():
        raise RequestError("the body is empty; expected a JSON object")
    odd: tuple[Fault, ...] = ()
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError):
        value = _careful(body)
        odd = tuple(_odd(value, ""))
        if not odd:  # refused by the strict decoder for a reason the other one does not know
            raise RequestError("the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is {shown(value)}; expected a JSON object")
    if not odd and body.count(b":") != len(value):
        _careful(body)  # the strict decoder keeps the last of two equal keys
    return Decoded(fields=value, odd=odd)


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(f"Content-Type: {shown(kind)} is not allowed; expected application/json", status=415)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HttpError(f"Content-Encoding: {shown(coding)} is not allowed; send the body as it is", status=415)


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(UPLOAD_S):
            more = True
            while more and size <= max(max_bytes, DRAINED_BYTES):
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                more = message.get("more_body", False)
    except TimeoutError:
        raise HttpError(f"the body did not arrive within {UPLOAD_S:g} s", status=408, headers=_CLOSE) from None
    if size > max_bytes:
        told = f"{size} bytes or more" if more else f"{size} bytes"
        raise HttpError(
            f"the body has {told}; at most {max_bytes} bytes are allowed (server.max_body_mib)",
            status=413,
            headers=_CLOSE,
        )
    return b"".join(parts)


_CLOSE = (("Connection", "close"),)


def _careful(body: bytes) -> object:
    """Decode by a decoder that says what is wrong where, takes NaN, and shows every pair of an object."""
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_distinct)
    except UnicodeDecodeError as exc:
        raise RequestError(f"the body is not valid UTF-8: byte {exc.start} is {body[exc.start]:#04x}") from None
    except json.JSONDecodeError as exc:
        raise RequestError(f"the body is not valid JSON: {exc.msg} at line {exc.lineno} column {exc.colno}") from None
    except ValueError as exc:
        raise RequestError(f"the body is not valid JSON: {exc}") from None


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, value in pairs:
            if name in seen:
                text = f"{shown(name)} is given twice, last as {shown(value)}; expected each field at most once"
                raise RequestError(text, field=name)
            seen.add(name)
    return found


def _odd(value: object, path: str) -> Iterator[Fault]:
    if isinstance(value, float) and not math.isfinite(value):
        yield fault(path, value, "a finite number")
    elif isinstance(value, str) and not encodable(value):
        yield fault(path, value, "valid Unicode, without lone surrogates")
    elif isinstance(value, dict):
        for name, item in value.items():
            if not encodable(name):
                yield fault(path or "body", name, "field names of valid Unicode")
            yield from _odd(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _odd(item, f"{path}[{at}]")
