"""What the real server offers streams beside ASGI's `send`, for tests that call the application themselves."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.frontend.http.stream import PIECES


@attrs.frozen(kw_only=True, eq=False)
class SentPieces:
    """A `BodyPieces` over a `send` that does not wait while `takes`."""

    send: Send
    takes: Callable[[], bool]

    def write(self, data: bytes) -> None:
        assert self.takes()
        sending = self.send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        assert next(sending, None) is None, "the test's `send` waited"


@attrs.frozen(kw_only=True, eq=False)
class OffersPieces:
    """An application behind a server that offers `BodyPieces`."""

    app: ASGIApp
    takes: Callable[[], bool] = lambda: True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = SentPieces(send=send, takes=self.takes)
        await self.app({**scope, "extensions": {PIECES: pieces}}, receive, send)
