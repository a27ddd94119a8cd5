"""The route table and the ASGI application over it."""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tokenspeed.frontend.http.access import CountAnswers, require_key
from tokenspeed.frontend.http.api import Api, Endpoint
from tokenspeed.frontend.http.docs_page import docs_page
from tokenspeed.frontend.http.errors import JSON, HttpError, failure
from tokenspeed.frontend.http.openapi import Operation, openapi_document
from tokenspeed.frontend.http.routes import ROUTES, UNSUPPORTED
from tokenspeed.frontend.http.status_page import status_page
from tokenspeed.plane.ports import Clock


async def _unsupported(_api: Api, request: Request) -> Response:
    raise HttpError(f"{request.url.path} is not supported by this server yet", code="not_supported")


async def _failed(_request: Request, exc: Exception) -> Response:
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
    )
    document, page = msgspec.json.encode(described), docs_page(described)

    async def describe(_api: Api, _request: Request) -> Response:
        return Response(document, media_type=JSON)

    async def show(_api: Api, _request: Request) -> Response:
        return Response(page, media_type="text/html")

    def route(path: str, methods: tuple[str, ...], endpoint: Endpoint) -> Route:
        return Route(path, endpoint, methods=list(methods))

    routes = [
        route(spec.path, spec.methods, Endpoint(api=api, name=spec.path, handle=spec.handle, work=spec.work))
        for spec in ROUTES
    ]
    routes += [route(path, ("POST",), Endpoint(api=api, name=path, handle=_unsupported)) for path in UNSUPPORTED]
    routes.append(route("/openapi.json", ("GET",), Endpoint(api=api, name="/openapi.json", handle=describe)))
    routes.append(route("/", ("GET",), Endpoint(api=api, name="/", handle=status_page)))
    routes.append(route("/docs", ("GET",), Endpoint(api=api, name="/docs", handle=show)))
    app: ASGIApp = Starlette(routes=routes, exception_handlers={404: _failed, 405: _failed, Exception: _failed})
    if api.settings.api_key is not None:
        app = require_key(app, api.settings.api_key)
    return CountAnswers(
        app=app, meter=api.meter, clock=clock, methods=frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
    )
