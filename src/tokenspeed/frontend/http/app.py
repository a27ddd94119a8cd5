"""The route table and the ASGI application over it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tokenspeed.frontend.http import chat, completions, info, text_tools
from tokenspeed.frontend.http.access import CountAnswers, require_key
from tokenspeed.frontend.http.api import Api, Endpoint
from tokenspeed.frontend.http.errors import JSON, HttpError, failure
from tokenspeed.frontend.http.openapi import Operation, openapi_document
from tokenspeed.frontend.http.replies import (
    ChatCompletion,
    Completion,
    Detokenized,
    Health,
    ModelList,
    Tokenized,
    Version,
)
from tokenspeed.frontend.http.replies import Model as ModelReply
from tokenspeed.frontend.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokenspeed.plane.ports import Clock


@attrs.frozen(kw_only=True)
class RouteSpec:
    """One row of the route table: how it is served, and how it is described."""

    path: str
    methods: tuple[str, ...]
    handle: Callable[[Api, Request], Awaitable[Response]]
    summary: str
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | None = None
    work: bool = False


def _get(
    path: str, handle: Callable[[Api, Request], Awaitable[Response]], summary: str, gives: type[msgspec.Struct] | None
) -> RouteSpec:
    return RouteSpec(path=path, methods=("GET",), handle=handle, summary=summary, gives=gives)


def _post(
    path: str,
    handle: Callable[[Api, Request], Awaitable[Response]],
    summary: str,
    takes: type[msgspec.Struct],
    gives: type[msgspec.Struct],
) -> RouteSpec:
    return RouteSpec(path=path, methods=("POST",), handle=handle, summary=summary, takes=takes, gives=gives, work=True)


ROUTES: tuple[RouteSpec, ...] = (
    _post("/v1/completions", completions.create_completion, "Complete prompts", CompletionRequest, Completion),
    _post("/v1/chat/completions", chat.create_chat_completion, "Answer a conversation", ChatRequest, ChatCompletion),
    _get("/v1/models", info.list_models, "The served model", ModelList),
    _get("/v1/models/{model:path}", info.get_model, "One model", ModelReply),
    _post("/tokenize", text_tools.tokenize, "Text to token ids", TokenizeRequest, Tokenized),
    _post("/v1/tokenize", text_tools.tokenize, "Text to token ids", TokenizeRequest, Tokenized),
    _post("/detokenize", text_tools.detokenize, "Token ids to text", DetokenizeRequest, Detokenized),
    _post("/v1/detokenize", text_tools.detokenize, "Token ids to text", DetokenizeRequest, Detokenized),
    _get("/health", info.health, "Whether requests can be served", Health),
    _get("/metrics", info.metrics, "Metrics in Prometheus' text format", None),
    _get("/version", info.version, "This package's version", Version),
    RouteSpec(
        path="/ping", methods=("GET", "POST"), handle=info.ping, summary="Whether the server answers", gives=Health
    ),
)

UNSUPPORTED = (
    *("/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank", "/v1/score", "/v1/moderations"),
    *("/v1/images/generations", "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/load_lora_adapter"),
    *("/v1/unload_lora_adapter", "/generate", "/rerank", "/score", "/pooling", "/classify"),
)
"""Routes of this family of servers that this build does not serve: they say so instead of 404."""


async def _unsupported(_api: Api, request: Request) -> Response:
    raise HttpError(f"{request.url.path} is not supported by this server yet", code="not_supported")


async def _failed(_request: Request, exc: Exception) -> Response:
    return failure(exc).response()


def build_app(api: Api, *, clock: Clock) -> ASGIApp:
    """The whole HTTP API as one ASGI application, without a lifespan of its own."""
    document = msgspec.json.encode(
        openapi_document(
            [
                Operation(path=spec.path, method=method, summary=spec.summary, takes=spec.takes, gives=spec.gives)
                for spec in ROUTES
                for method in spec.methods
            ],
            version=api.version,
            keyed=api.settings.api_key is not None,
        )
    )

    async def describe(_api: Api, _request: Request) -> Response:
        return Response(document, media_type=JSON)

    def route(path: str, methods: tuple[str, ...], endpoint: Endpoint) -> Route:
        return Route(path, endpoint, methods=list(methods))

    routes = [
        route(spec.path, spec.methods, Endpoint(api=api, name=spec.path, handle=spec.handle, work=spec.work))
        for spec in ROUTES
    ]
    routes += [route(path, ("POST",), Endpoint(api=api, name=path, handle=_unsupported)) for path in UNSUPPORTED]
    routes.append(route("/openapi.json", ("GET",), Endpoint(api=api, name="/openapi.json", handle=describe)))
    app: ASGIApp = Starlette(routes=routes, exception_handlers={404: _failed, 405: _failed, Exception: _failed})
    if api.settings.api_key is not None:
        app = require_key(app, api.settings.api_key)
    return CountAnswers(
        app=app, meter=api.meter, clock=clock, methods=frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
    )
