"""Control routes, under the names of SGLang and vLLM: each is one operation, carried out by every engine.

They exist only where ``server.admin_key`` is set, and take that key alone. Arguments are the fields of a
JSON body, or the query's. An operation that an engine refuses is answered with status 400, ``success``
false and the reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.errors import RequestError
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.body import read_json
from tokenspeed.frontend.http.errors import JSON, ErrorInfo, HttpError
from tokenspeed.plane.messages import AbortRequest, ControlOp, ControlReply
from tokenspeed.plane.operations import AskOp, StartProfileOp, StopProfileOp
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.operations import operation_of

log = logging.getLogger("tokenspeed.admin")

MAX_TOLD_CHARS = 1024

_POST, _BOTH = ("POST",), ("GET", "POST")

ADMIN_METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pause_generation": _POST,
        "continue_generation": _POST,
        "pause": _POST,
        "resume": _POST,
        "is_paused": _BOTH,
        "release_memory_occupation": _POST,
        "resume_memory_occupation": _POST,
        "sleep": _POST,
        "wake_up": _POST,
        "is_sleeping": _BOTH,
        "flush_cache": _BOTH,
        "reset_prefix_cache": _POST,
        "update_weights_from_disk": _POST,
        "update_weights_from_tensor": _POST,
        "update_weights_from_distributed": _POST,
        "init_weights_update_group": _POST,
        "destroy_weights_update_group": _POST,
        "update_weight_version": _POST,
        "abort_request": _POST,
        "abort": _POST,
        "start_profile": _BOTH,
        "stop_profile": _BOTH,
        "get_internal_state": _BOTH,
    }
)
"""Operations by name, each served under ``/NAME``, with its HTTP methods."""


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`message`: why not; `output`: the file of a recording, by engine; `aborted`: sequences that were ended."""

    success: bool
    message: str
    output: list[str] | None = None
    aborted: int | None = None
    error: ErrorInfo | None = None


@attrs.frozen(kw_only=True, eq=False)
class AdminRoute:
    """Answers one control route."""

    method: str

    async def __call__(self, api: Api, request: Request) -> Response:
        if api.admin_key is None:
            raise HttpError("control routes are off; set server.admin_key", status=404, code="not_found")
        body = await _arguments(api, request)
        try:
            op = operation_of(0, self.method, body)
        except WireError as fault:
            raise RequestError(str(fault), field=fault.field) from fault
        if isinstance(op, AbortRequest):
            return _abort(api, op)
        began_s = api.service.clock.now_s()
        replies = await asyncio.gather(*(_called(api, at, op) for at in range(len(api.service.engines))))
        if not isinstance(op, AskOp):
            why = "; ".join(reply.message for reply in replies if not reply.success)
            told = f"refused: {_one_line(why)}" if why else "done"
            log.info("%s: %s, %.3f s", self.method, told, api.service.clock.now_s() - began_s)
        return _answer(op, replies)


def admin_routes() -> tuple[tuple[str, tuple[str, ...], Callable[[Api, Request], Awaitable[Response]]], ...]:
    """(path, HTTP methods, handler) of every control route."""
    return tuple((f"/{name}", methods, AdminRoute(method=name)) for name, methods in ADMIN_METHODS.items())


async def _arguments(api: Api, request: Request) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        found[name] = values if name == "tags" else _scalar(values[-1])
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        decoded = await read_json(request, max_bytes=api.max_body_bytes)
        found.update(decoded.fields)
    return found


def _scalar(text: str) -> object:
    """What a query's value stands for."""
    if text in ("true", "false"):
        return text == "true"
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


async def _called(api: Api, at: int, op: ControlOp) -> ControlReply:
    limit_s = api.settings.request_timeout_s
    try:
        return await api.service.engines[at].call(lambda call_id: attrs.evolve(op, call_id=call_id), timeout_s=limit_s)
    except TimeoutError:
        raise HttpError(f"the engine has not answered within {limit_s:g} s; it goes on", status=408) from None


def _one_line(text: str) -> str:
    """A refusal as it can stand in a log: paths and names in it are the caller's."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TOLD_CHARS])


def _abort(api: Api, op: AbortRequest) -> Response:
    """Ends what this server knows under that name; an unknown one has ended already, which is no fault."""
    if op.every:
        count = api.service.in_flight
        api.service.end_all()
    else:
        count = sum(api.service.end_named(rid) for rid in op.rids)
    return Response(msgspec.json.encode(Outcome(success=True, message="", aborted=count)), media_type=JSON)


def _answer(op: ControlOp, replies: list[ControlReply]) -> Response:
    refusals = [f"engine {at}: {reply.message}" for at, reply in enumerate(replies) if not reply.success]
    if refusals:
        text = replies[0].message if len(replies) == 1 else "; ".join(refusals)
        error = ErrorInfo(message=text, type="invalid_request_error", param=None, code="refused")
        return Response(
            msgspec.json.encode(Outcome(success=False, message=text, error=error)), status_code=400, media_type=JSON
        )
    if isinstance(op, AskOp):
        return Response(_merged([json.loads(reply.message) for reply in replies]), media_type=JSON)
    body = Outcome(success=True, message="")
    if isinstance(op, StartProfileOp | StopProfileOp):
        body.output = [reply.message for reply in replies]
    return Response(msgspec.json.encode(body), media_type=JSON)


def _merged(answers: list[dict[str, object]]) -> bytes:
    """The first engine's answer; what is so of any engine is so of the server."""
    flags = {
        name: any(answer[name] for answer in answers) for name, value in answers[0].items() if isinstance(value, bool)
    }
    return msgspec.json.encode({**answers[0], **flags})
