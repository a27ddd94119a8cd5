"""What wraps all routes: the API key, and the count of answers."""

from __future__ import annotations

import hashlib
import hmac

import attrs
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.errors import RequestError
from tokenspeed.frontend.http.api import HttpMeter
from tokenspeed.frontend.http.errors import CLIENT_CLOSED, failure
from tokenspeed.plane.ports import Clock

OPEN_PATHS = ("/", "/health", "/readiness", "/liveness", "/metrics")


@attrs.frozen(kw_only=True, eq=False)
class RequireKey:
    """Answers 401 without the API key, on every path but :data:`OPEN_PATHS`."""

    app: ASGIApp
    digest: bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self.holds_key(scope):
            await self.app(scope, receive, send)
            return
        error = RequestError(
            "the API key is missing or wrong; send Authorization: Bearer KEY or X-Api-Key: KEY", status=401
        )
        await failure(error).response()(scope, receive, send)

    def holds_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, key = value.partition(b" ")
                return kind.lower() == b"bearer" and hmac.compare_digest(_digest(key.strip()), self.digest)
            if name == b"x-api-key":
                return hmac.compare_digest(_digest(value.strip()), self.digest)
        return False


def require_key(app: ASGIApp, key: str) -> RequireKey:
    return RequireKey(app=app, digest=_digest(key.encode()))


def _digest(key: bytes) -> bytes:
    """Of fixed length, so that comparing takes the same time for every key."""
    return hashlib.sha256(key).digest()


@attrs.frozen(kw_only=True, eq=False)
class CountAnswers:
    """Records every answer's route, method, status and duration; the outermost application."""

    app: ASGIApp
    meter: HttpMeter
    clock: Clock
    methods: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s = self.clock.now_s()
        status = CLIENT_CLOSED

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            self.meter.answered(
                handler=str(getattr(scope.get("endpoint"), "name", "other")),
                method=scope["method"] if scope["method"] in self.methods else "other",
                status=status,
                seconds=self.clock.now_s() - began_s,
            )
