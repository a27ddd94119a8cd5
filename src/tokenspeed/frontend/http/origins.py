"""Requests of web pages: whose are served, and who may read the answers (CORS, in the Fetch standard)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.frontend.http.errors import HttpError, failure
from tokenspeed.plane.checks import shown

EVERY = "*"
METHODS = ("GET", "POST", "DELETE")
READABLE = ("X-Request-Id", "Retry-After")
"""Response headers that a page's script may read beside the usual ones."""


@attrs.frozen(kw_only=True, eq=False)
class PageOrigins:
    """Looks at requests with an Origin header only: what no page sent goes on untouched, and costs a stream nothing.

    Attributes:
        app: all routes.
        shared: the same; pages may read its answers, and it answers their preflights.
        allowed: origins whose pages are served; None: every one. A page of another one is refused, not only kept from
            the answer: it may have got here by a name of its own for this address, or not care for an answer.
        closed: paths that no page's script gets to, whatever is allowed: control routes.
    """

    app: ASGIApp
    shared: ASGIApp
    allowed: frozenset[str] | None
    closed: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = origin_of(scope)
        if origin is None:
            await self.app(scope, receive, send)
        elif self.allowed is not None and origin not in self.allowed:
            text = f"pages of {shown(origin)} are not served; server.allowed_origins names those that are"
            await failure(HttpError(text, status=403, code="origin_not_allowed")).response()(scope, receive, send)
        elif scope["path"] in self.closed:
            await self.app(scope, receive, send)
        else:
            await self.shared(scope, receive, send)


def origin_of(scope: Scope) -> str | None:
    """Where the page came from that sent this request; None: no page did, or one of ours that reads."""
    if scope["type"] != "http":
        return None
    for name, value in scope["headers"]:
        if name == b"origin":
            return str(value.decode("latin-1"))
    return None


def page_origins(app: ASGIApp, allowed: Sequence[str], *, closed: frozenset[str]) -> PageOrigins:
    """
    Args:
        allowed: origins as browsers write them, or "*".
    """
    # No credentials: a browser adds no cookie and no remembered password to what a page asks, and the key is not in it.
    shared = CORSMiddleware(
        app, allow_origins=allowed, allow_methods=METHODS, allow_headers=(EVERY,), expose_headers=READABLE
    )
    return PageOrigins(app=app, shared=shared, allowed=None if EVERY in allowed else frozenset(allowed), closed=closed)
