"""The route table: each route as it is served and described."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.http import (
    chat,
    completions,
    info,
    messages_api,
    native_generate,
    probes,
    responses,
    text_tools,
)
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.info_replies import Loads, ModelInfo, ServerInfo, ServerLoad, WeightVersion
from tokenspeed.frontend.http.messages_schema import CountedTokens, CountTokensRequest, MessageReply, MessagesRequest
from tokenspeed.frontend.http.native_schema import Generated, GenerateFields
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
from tokenspeed.frontend.http.responses_schema import Deleted, ResponseReply, ResponsesRequest
from tokenspeed.frontend.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

RESPONSE = "/v1/responses/{response_id}"


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
    statuses: tuple[int, ...] = ()
    """What it may answer beside 200 and what its kind of route may."""


def _get(
    path: str,
    handle: Callable[[Api, Request], Awaitable[Response]],
    summary: str,
    gives: type[msgspec.Struct] | None,
    statuses: tuple[int, ...] = (),
) -> RouteSpec:
    return RouteSpec(path=path, methods=("GET",), handle=handle, summary=summary, gives=gives, statuses=statuses)


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
    _post("/generate", native_generate.generate, "Generate, in SGLang's form", GenerateFields, Generated),
    _post("/tokenize", text_tools.tokenize, "Text to token ids", TokenizeRequest, Tokenized),
    _post("/v1/tokenize", text_tools.tokenize, "Text to token ids", TokenizeRequest, Tokenized),
    _post("/detokenize", text_tools.detokenize, "Token ids to text", DetokenizeRequest, Detokenized),
    _post("/v1/detokenize", text_tools.detokenize, "Token ids to text", DetokenizeRequest, Detokenized),
    _post("/v1/responses", responses.create_response, "Answer, with items", ResponsesRequest, ResponseReply),
    _get(RESPONSE, responses.get_response, "A stored response", ResponseReply),
    RouteSpec(path=RESPONSE, methods=("DELETE",), handle=responses.delete_response, summary="Forget it", gives=Deleted),
    RouteSpec(
        path=f"{RESPONSE}/cancel",
        methods=("POST",),
        handle=responses.cancel_response,
        summary="End a response made in the background",
        gives=ResponseReply,
        statuses=(400,),
    ),
    _post("/v1/messages", messages_api.create_message, "Answer messages of blocks", MessagesRequest, MessageReply),
    _post(
        "/v1/messages/count_tokens",
        messages_api.count_tokens,
        "Tokens of such messages",
        CountTokensRequest,
        CountedTokens,
    ),
    _get("/health", probes.health, "Whether requests can be served", Health, (503,)),
    _get("/readiness", probes.health, "The same", Health, (503,)),
    _get("/liveness", probes.live, "Whether the server answers", Health),
    _get("/health_generate", probes.health_generate, "Whether an engine generates", Health, (429, 503)),
    _get("/metrics", info.metrics, "Metrics in Prometheus' text format", None),
    _get("/version", info.version, "This package's version", Version),
    _get("/load", info.load, "Sequences in flight", ServerLoad),
    _get("/v1/loads", info.loads, "The engines' loads", Loads),
    _get("/get_load", info.loads, "The engines' loads", Loads),
    _get("/server_info", info.server_info, "Settings and engines", ServerInfo),
    _get("/get_server_info", info.server_info, "Settings and engines", ServerInfo),
    _get("/model_info", info.model_info, "The model as the server sees it", ModelInfo),
    _get("/get_model_info", info.model_info, "The model as the server sees it", ModelInfo),
    _get("/get_weight_version", info.weight_version, "The version of the weights that serve", WeightVersion),
    _get("/weight_info", info.weight_version, "The same", WeightVersion),
    RouteSpec(
        path="/ping", methods=("GET", "POST"), handle=probes.live, summary="Whether the server answers", gives=Health
    ),
)

UNSUPPORTED = (
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/moderations"),
    *("/v1/images/generations", "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/load_lora_adapter"),
    *("/v1/unload_lora_adapter", "/rerank", "/score", "/pooling", "/classify"),
)
"""Routes of this family of servers that this build does not serve: they say so instead of 404."""
