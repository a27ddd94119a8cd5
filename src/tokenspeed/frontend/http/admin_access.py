"""The admin key: the only one that opens control routes, and good for all others."""

from __future__ import annotations

import attrs
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.frontend.http.access import RequireKey, require_key
from tokenspeed.frontend.http.errors import HttpError, failure

_GIVEN = (b"authorization", b"x-api-key")


@attrs.frozen(kw_only=True, eq=False)
class AdminDoor:
    """On control routes: 401 without a key, 403 with another one.

    Attributes:
        lock: knows the admin key; in front of all routes.
        rest: what answers whoever does not hold it, on the other routes.
    """

    lock: RequireKey
    rest: ASGIApp
    paths: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.lock.holds_key(scope):
            await self.lock.app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] in self.paths:
            given = any(name in _GIVEN for name, _ in scope["headers"])
            text = "control routes take the admin key (server.admin_key), as Authorization: Bearer KEY"
            error = HttpError(text, status=403 if given else 401)
            await failure(error).response()(scope, receive, send)
        else:
            await self.rest(scope, receive, send)


def admin_door(app: ASGIApp, rest: ASGIApp, key: str, paths: frozenset[str]) -> AdminDoor:
    """
    Args:
        app: all routes, open.
        rest: the same behind what guards them otherwise.
    """
    return AdminDoor(lock=require_key(app, key), rest=rest, paths=paths)
