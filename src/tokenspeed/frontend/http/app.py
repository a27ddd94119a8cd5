"""The route table and the ASGI application over it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.frontend.http.access import CountAnswers, require_key
from tokenspeed.frontend.http.admin import admin_routes
from tokenspeed.frontend.http.admin_access import admin_door
from tokenspeed.frontend.http.api import Api, Endpoint
from tokenspeed.frontend.http.docs_page import docs_page
from tokenspeed.frontend.http.errors import JSON, HttpError, failure
from tokenspeed.frontend.http.openapi import Operation, openapi_document
from tokenspeed.frontend.http.origins import EVERY, page_origins
from tokenspeed.frontend.http.routes import ROUTES, UNSUPPORTED, RouteSpec
from tokenspeed.frontend.http.status_page import status_page
from tokenspeed.plane.checks import shown
from tokenspeed.plane.ports import Clock


async def _unsupported(_api: Api, request: Request) -> Response:
    raise HttpError(f"{request.url.path} is not supported by this server yet", code="not_supported")


@attrs.frozen(kw_only=True, eq=False)
class ByMethod:
    """One path's endpoints, by method: one route, so that an answer of 405 names all methods."""

    name: str
    endpoints: Mapping[str, Endpoint]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self.endpoints[method](scope, receive, send)


def by_method(api: Api, specs: Sequence[RouteSpec]) -> ByMethod:
    """The endpoints of `specs`, which have one path."""
    made = {
        method: Endpoint(api=api, name=spec.path, handle=spec.handle, work=spec.work)
        for spec in specs
        for method in spec.methods
    }
    return ByMethod(name=specs[0].path, endpoints=MappingProxyType(made))


@attrs.frozen(kw_only=True, eq=False)
class Unrouted:
    """Answers what no route took: which path or method there is instead."""

    paths: frozenset[str]

    async def __call__(self, request: Request, exc: Exception) -> Response:
        path = str(request.scope["path"])  # of a URL that is put together anew, `//v1` would be the host
        if isinstance(exc, HTTPException) and exc.status_code == 404:
            plain = re.sub("//+", "/", path)
            nearby = (plain, f"/v1{plain}", plain.removeprefix("/v1"))
            nearest = next((near for near in nearby if near != path and near in self.paths), None)
            hint = f"did you mean {nearest}?" if nearest is not None else "GET /openapi.json lists all of them"
            exc = HttpError(f"there is no route {shown(path)}; {hint}", status=404, code="not_found")
        elif isinstance(exc, HTTPException) and exc.status_code == 405:
            headers = exc.headers or {}
            there = headers.get("Allow", "another one")
            exc = HttpError(
                f"the method {shown(request.method)} is not allowed on {shown(path)}; expected {there}",
                status=405,
                headers=tuple(headers.items()),
            )
        return failure(exc).response()


def build_app(api: Api, *, clock: Clock) -> ASGIApp:
    """The whole HTTP API as one ASGI application, without a lifespan of its own."""
    described = openapi_document(
        [
            Operation(
                path=spec.path,
                method=method,
                summary=spec.summary,
                takes=spec.takes,
                gives=spec.gives,
                statuses=spec.statuses,
            )
            for spec in ROUTES
            for method in spec.methods
        ],
        version=api.version,
        keyed=api.settings.api_key is not None,
        always=() if EVERY in api.allowed_origins else (403,),
    )
    document, page = msgspec.json.encode(described), docs_page(described)

    async def describe(_api: Api, _request: Request) -> Response:
        return Response(document, media_type=JSON)

    async def show(_api: Api, _request: Request) -> Response:
        return Response(page, media_type="text/html")

    def route(path: str, methods: tuple[str, ...], endpoint: Endpoint) -> Route:
        return Route(path, endpoint, methods=list(methods))

    specs: dict[str, list[RouteSpec]] = {}
    for spec in ROUTES:
        specs.setdefault(spec.path, []).append(spec)
    routes = [
        Route(path, by_method(api, found), methods=[method for spec in found for method in spec.methods])
        for path, found in specs.items()
    ]
    routes += [route(path, ("POST",), Endpoint(api=api, name=path, handle=_unsupported)) for path in UNSUPPORTED]
    routes += [
        route(path, methods, Endpoint(api=api, name=path, handle=handle)) for path, methods, handle in admin_routes()
    ]
    routes.append(route("/openapi.json", ("GET",), Endpoint(api=api, name="/openapi.json", handle=describe)))
    routes.append(route("/", ("GET",), Endpoint(api=api, name="/", handle=status_page)))
    routes.append(route("/docs", ("GET",), Endpoint(api=api, name="/docs", handle=show)))
    unrouted = Unrouted(paths=frozenset(route.path for route in routes))
    app: ASGIApp = Starlette(routes=routes, exception_handlers={404: unrouted, 405: unrouted, Exception: unrouted})
    everything = app
    if api.settings.api_key is not None:
        app = require_key(app, api.settings.api_key)
    control = frozenset(path for path, _, _ in admin_routes())
    if api.admin_key is not None:
        app = admin_door(everything, app, api.admin_key, control)
    app = page_origins(app, api.allowed_origins, closed=control)
    return CountAnswers(
        app=app, meter=api.meter, clock=clock, methods=frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
    )
