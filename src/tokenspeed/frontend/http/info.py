"""Endpoints that tell about the server: models, load, settings, metrics, version."""

from __future__ import annotations

import asyncio
import enum

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.engine_client import EngineClient
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.common import check_model
from tokenspeed.frontend.http.errors import JSON
from tokenspeed.frontend.http.info_replies import (
    EngineLoad,
    EngineReply,
    Loads,
    LoadSum,
    ModelInfo,
    ServerInfo,
    ServerLoad,
    WeightVersion,
)
from tokenspeed.frontend.http.replies import Model, ModelList, Version
from tokenspeed.plane.messages import LoadReport

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def json_reply(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)


def _model(api: Api) -> Model:
    info = api.service.info
    return Model(id=info.model, created=api.created, root=api.model_path, max_model_len=info.max_model_len)


async def list_models(api: Api, _request: Request) -> Response:
    return json_reply(ModelList(data=[_model(api)]))


async def get_model(api: Api, request: Request) -> Response:
    check_model(api, request.path_params["model"])
    return json_reply(_model(api))


async def version(api: Api, _request: Request) -> Response:
    return json_reply(Version(version=api.version))


async def metrics(api: Api, _request: Request) -> Response:
    # Tens of milliseconds with some hundred series and the ranks' files: no stream should wait for that.
    text = await asyncio.to_thread(api.metrics.scrape)
    return Response(text, headers={"content-type": METRICS_TYPE})


async def load(api: Api, _request: Request) -> Response:
    """Sequences in flight."""
    return json_reply(ServerLoad(server_load=api.service.in_flight))


def _load(engine: EngineClient) -> EngineLoad:
    """What one engine last reported; before its first report, what was sent to it."""
    report = engine.load or LoadReport(waiting=engine.in_flight)
    capacity, total = engine.info.kv_capacity_tokens, report.total_blocks
    return EngineLoad(
        dp_rank=engine.info.engine_index,
        alive=engine.alive,
        num_running_reqs=report.running,
        num_waiting_reqs=report.waiting,
        num_total_reqs=report.running + report.waiting,
        num_used_tokens=tokens_of_blocks(report.active_blocks, total, capacity),
        num_cached_tokens=tokens_of_blocks(report.resident_blocks, total, capacity),
        max_total_num_tokens=capacity,
        token_usage=report.active_blocks / total if total else 0.0,
    )


def tokens_of_blocks(blocks: int, total: int, capacity: int) -> int:
    """Tokens that `blocks` of the pool stand for: a block is not a fixed number of them in every layout (FW-33)."""
    return blocks * capacity // total if total else 0


async def loads(api: Api, _request: Request) -> Response:
    """The engines' latest load reports and their sum."""
    found = [_load(engine) for engine in api.service.engines]
    total = LoadSum(
        total_running_reqs=sum(one.num_running_reqs for one in found),
        total_waiting_reqs=sum(one.num_waiting_reqs for one in found),
        total_reqs=sum(one.num_total_reqs for one in found),
        total_used_tokens=sum(one.num_used_tokens for one in found),
        avg_token_usage=sum(one.token_usage for one in found) / len(found),
    )
    return json_reply(
        Loads(timestamp=api.wall_s(), version=api.version, dp_rank_count=len(found), loads=found, aggregate=total)
    )


async def model_info(api: Api, _request: Request) -> Response:
    info = api.service.info
    return json_reply(
        ModelInfo(
            model_path=api.model_path,
            tokenizer_path=api.model_path,
            served_model_name=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            model_type=info.model_type,
            architectures=list(info.architectures),
            has_chat_template=api.prompts.chat is not None,
            tool_parser=api.family.calls,
            reasoning_parser=None if api.family.reasoning is None else api.family.reasoning.opens,
            weight_version=api.service.weight_version,
        )
    )


async def weight_version(api: Api, _request: Request) -> Response:
    return json_reply(WeightVersion(weight_version=api.service.weight_version))


async def server_info(api: Api, _request: Request) -> Response:
    """The server's settings without its secrets, and what each engine registered with."""
    settings = {
        field.name: value.value if isinstance(value := getattr(api.settings, field.name), enum.Enum) else value
        for field in attrs.fields(type(api.settings))
        if not field.metadata.get("secret")
    }
    engines = [
        EngineReply(
            engine_index=engine.info.engine_index,
            alive=engine.alive,
            role=engine.info.role,
            instance_id=engine.info.instance_id,
            num_blocks=engine.info.num_blocks,
            block_size=engine.info.block_size,
            max_num_seqs=engine.info.max_num_seqs,
            max_batched_tokens=engine.info.max_batched_tokens,
            max_waiting=engine.info.max_waiting,
            max_logprobs=engine.info.max_logprobs,
            max_total_num_tokens=engine.info.kv_capacity_tokens,
            load=_load(engine),
        )
        for engine in api.service.engines
    ]
    info = api.service.info
    return json_reply(
        ServerInfo(
            version=api.version,
            model_path=api.model_path,
            tokenizer_path=api.model_path,
            served_model_name=info.model,
            max_model_len=info.max_model_len,
            dp_size=len(engines),
            max_total_num_tokens=sum(one.max_total_num_tokens for one in engines),
            server=settings,
            internal_states=engines,
        )
    )
