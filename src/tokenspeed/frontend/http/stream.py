"""Server-sent events: the first delta decides the status line, a later failure becomes one error event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress

import attrs
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.frontend.generation import ChoiceDelta
from tokenspeed.frontend.http.api import unless_gone
from tokenspeed.frontend.http.errors import ClientGone, Failure, failure

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LINE_BREAKS = tuple((sign.encode(), b"\\u%04x" % ord(sign)) for sign in "\x85\u2028\u2029")
DONE = b"data: [DONE]\n\n"
GRACE_S = 5.0
"""What a response may last beyond the request's own limit: a reader that stalls is given up then."""


def event(body: object) -> bytes:
    """One event on one line: also for clients that take every Unicode line break for one, which JSON does not."""
    data = msgspec.json.encode(body)
    if not data.isascii():
        for raw, escaped in LINE_BREAKS:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


def named_event(body: object) -> bytes:
    """One event that is called what the `type` of its body says."""
    name = body.get("type") if isinstance(body, dict) else None
    return (b"" if name is None else f"event: {name}\n".encode()) + event(body)


def _error_body(found: Failure) -> object:
    return found.body


@attrs.frozen(kw_only=True)
class EventStyle:
    """How one API writes its events.

    Attributes:
        encode: one event's bytes.
        failed: the body of the one event that tells a failure.
        end: what follows the last event of a stream that did not fail.
    """

    encode: Callable[[object], bytes] = event
    failed: Callable[[Failure], object] = _error_body
    end: bytes = DONE


class EventStream(Response):
    """Streams the chunks of a generation.

    Nothing is sent before the first delta, so that a refusal has its own status. The client's
    leaving is noticed at any time, not only while something is sent. Sending waits for the client
    to read; meanwhile new tokens collect, unsent, in one buffer per sequence.
    """

    def __init__(
        self,
        deltas: AsyncGenerator[ChoiceDelta, None],
        *,
        chunks: Callable[[ChoiceDelta], Iterable[object]],
        last: Callable[[], Iterable[object]],
        limit_s: float,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        style: EventStyle = EventStyle(),
    ) -> None:
        """
        Args:
            chunks: what to send for a delta.
            last: what to send after the last delta.
            limit_s: the request's own time limit.
        """
        super().__init__()
        self._deltas = deltas
        self._chunks = chunks
        self._last = last
        self._limit_s = limit_s + GRACE_S
        self._head = (*HEADERS, *headers)
        self._style = style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await unless_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas) as deltas:
            try:
                first = await anext(deltas)
            except Exception as exc:  # an answer, whatever it was
                await failure(exc).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self._head})
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._send(send, self._chunks(first))
                    async for delta in deltas:
                        await self._send(send, self._chunks(delta))
                    await self._send(send, self._last(), end=self._style.end)
            except TimeoutError:
                # The client does not read, so it cannot be told: the server closes the unfinished response.
                raise ClientGone from None
            except Exception as exc:  # told in the stream, which then closes
                await send({"type": "http.response.body", "body": self._style.encode(self._style.failed(failure(exc)))})
            else:
                await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, bodies: Iterable[object], end: bytes = b"") -> None:
        data = b"".join([self._style.encode(body) for body in bodies]) + end
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
