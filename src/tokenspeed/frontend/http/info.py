"""Endpoints that tell about the server: models, health, metrics, version."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.errors import RequestError
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.common import check_model
from tokenspeed.frontend.http.errors import JSON
from tokenspeed.frontend.http.replies import Health, Model, ModelList, Version

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)


def _model(api: Api) -> Model:
    info = api.service.info
    return Model(id=info.model, created=api.created, root=info.model, max_model_len=info.max_model_len)


async def list_models(api: Api, _request: Request) -> Response:
    return _json(ModelList(data=[_model(api)]))


async def get_model(api: Api, request: Request) -> Response:
    check_model(api, request.path_params["model"])
    return _json(_model(api))


async def health(api: Api, _request: Request) -> Response:
    """200 while some engine is alive and, with work pending, making progress; else 503. Never waits."""
    if trouble := api.trouble():
        raise RequestError(trouble, status=503)
    return _json(Health())


async def ping(_api: Api, _request: Request) -> Response:
    """200 while the HTTP server itself answers."""
    return _json(Health())


async def version(api: Api, _request: Request) -> Response:
    return _json(Version(version=api.version))


async def metrics(api: Api, _request: Request) -> Response:
    return Response(api.metrics.scrape(), headers={"content-type": METRICS_TYPE})
