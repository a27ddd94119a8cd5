"""Server-sent events: the first delta decides the status line, a later failure becomes one error event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.frontend.generation import ChoiceDelta
from tokenspeed.frontend.http.api import unless_gone
from tokenspeed.frontend.http.errors import ClientGone, failure

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LINE_BREAKS = tuple((sign.encode(), b"\\u%04x" % ord(sign)) for sign in "\x85\u2028\u2029")
DONE = b"data: [DONE]\n\n"
GRACE_S = 5.0
"""What a response may last beyond the request's own limit: a reader that stalls is given up then."""


def event(body: msgspec.Struct) -> bytes:
    """One event on one line: also for clients that take every Unicode line break for one, which JSON does not."""
    data = msgspec.json.encode(body)
    for raw, escaped in LINE_BREAKS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


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
        chunks: Callable[[ChoiceDelta], Iterable[msgspec.Struct]],
        last: Callable[[], Iterable[msgspec.Struct]],
        limit_s: float,
        headers: tuple[tuple[bytes, bytes], ...] = (),
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
                    await self._send(send, self._last(), end=DONE)
            except TimeoutError:
                # The client does not read, so it cannot be told: the server closes the unfinished response.
                raise ClientGone from None
            except Exception as exc:  # told in the stream, which then closes
                await send({"type": "http.response.body", "body": event(failure(exc).body)})
            else:
                await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, bodies: Iterable[msgspec.Struct], end: bytes = b"") -> None:
        data = b"".join([event(body) for body in bodies]) + end
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
