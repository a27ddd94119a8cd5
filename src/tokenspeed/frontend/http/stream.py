"""Server-sent events: the first delta decides the status line, a later failure becomes one error event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Protocol

import attrs
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.frontend.generation import ChoiceDelta
from tokenspeed.frontend.http.api import unless_gone
from tokenspeed.frontend.http.errors import ClientGone, Failure, failure
from tokenspeed.frontend.ports import DeltaSink

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LINE_BREAKS = tuple((sign.encode(), b"\\u%04x" % ord(sign)) for sign in "\x85\u2028\u2029")
ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
GRACE_S = 5.0
"""What a response may last beyond the request's own limit: a reader that stalls is given up then."""


def on_one_line(value: object) -> bytes:
    """JSON without any of Unicode's line breaks, some of which it allows in a string."""
    data = ENCODER.encode(value)
    if not data.isascii():
        for raw, escaped in LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


def event(body: object) -> bytes:
    """One event on one line: also for clients that take every Unicode line break for one."""
    return b"data: " + on_one_line(body) + b"\n\n"


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

    def events(self, bodies: Iterable[object]) -> bytes:
        return b"".join([self.encode(body) for body in bodies])


@attrs.define(eq=False)
class TextFrames:
    """Events of one stream that differ in their text alone: what stands around it is encoded once a choice.

    Writer: the answer it belongs to.

    Attributes:
        key: what the text is called in an event; no string of JSON can hold a quoted name with its colon.
    """

    key: str
    around: dict[tuple[int, int], tuple[bytes, bytes]] = attrs.field(factory=dict[tuple[int, int], tuple[bytes, bytes]])

    def event(self, place: tuple[int, int], text: str) -> bytes | None:
        """The event of the choice at `place` with `text`; None: none was made whole yet."""
        found = self.around.get(place)
        return None if found is None else b"%b%b%b" % (found[0], on_one_line(text), found[1])

    def learn(self, place: tuple[int, int], text: str, whole: bytes) -> bytes:
        """Returns: `whole`, the event with `text`."""
        head, _, tail = whole.partition(b'"%s":%s' % (self.key.encode(), on_one_line(text)))
        self.around[place] = (b'%s"%s":' % (head, self.key.encode()), tail)
        return whole


class BodyPieces(Protocol):
    """A way past ASGI's `send` for pieces of a body that has begun and goes on."""

    def takes(self) -> bool:
        """Whether the connection takes more now; if not, `send` waits until it does."""
        ...

    def write(self, data: bytes) -> None:
        """Send `data`, or drop it if the client has left."""
        ...


PIECES = "tokenspeed.pieces"
"""The ASGI extension under which a server offers its `BodyPieces`."""


@attrs.define(eq=False)
class DirectSink:
    """Sends events from where their tokens arrive. A `DeltaSink`; writer: its EventStream, once the response began."""

    events: Callable[[ChoiceDelta], bytes]
    pieces: BodyPieces | None = None

    def takes(self) -> bool:
        return self.pieces is not None and self.pieces.takes()

    def put(self, delta: ChoiceDelta) -> None:
        data = self.events(delta)
        if data and self.pieces is not None:
            self.pieces.write(data)


class EventStream(Response):
    """Streams the chunks of a generation.

    Nothing is sent before the first delta, so that a refusal has its own status. The client's
    leaving is noticed at any time, not only while something is sent. Sending waits for the client
    to read; meanwhile new tokens collect, unsent, in one buffer per sequence. While it does read, tokens are sent
    from where they arrive, and the task of the stream sleeps until the end.
    """

    def __init__(
        self,
        begin: Callable[[DeltaSink], AsyncGenerator[ChoiceDelta, None]],
        *,
        events: Callable[[ChoiceDelta], bytes],
        last: Callable[[], Iterable[object]],
        limit_s: float,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        style: EventStyle = EventStyle(),
    ) -> None:
        """
        Args:
            begin: the deltas that were not put into the sink.
            events: what to send for a delta.
            last: what to send after the last delta.
            limit_s: the request's own time limit.
            headers: of the response, an error's too.
        """
        super().__init__()
        self._sink = DirectSink(events=events)
        self._deltas = begin(self._sink)
        self._events = events
        self._last = last
        self._limit_s = limit_s + GRACE_S
        self._more = headers
        self._style = style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await unless_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas) as deltas:
            try:
                first = await anext(deltas)
            except Exception as exc:  # an answer, whatever it was
                refused = failure(exc).response()
                refused.raw_headers += self._more
                await refused(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": (*HEADERS, *self._more)})
            self._sink.pieces = scope.get("extensions", {}).get(PIECES)
            try:
                async with asyncio.timeout(self._limit_s):
                    await _send(send, self._events(first))
                    async for delta in deltas:
                        await _send(send, self._events(delta))
                    data = self._style.events(self._last()) + self._style.end
                    await send({"type": "http.response.body", "body": data})
            except TimeoutError:
                # The client does not read, so it cannot be told: the server closes the unfinished response.
                raise ClientGone from None
            except Exception as exc:  # told in the stream, which then closes
                await send({"type": "http.response.body", "body": self._style.encode(self._style.failed(failure(exc)))})


async def _send(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
