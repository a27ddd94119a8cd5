"""POST /v1/responses, and what can be asked of a response later: get, cancel, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.errors import RequestError
from tokenspeed.frontend.calls import CallName
from tokenspeed.frontend.generation import ChoiceDelta
from tokenspeed.frontend.http.api import Api, unless_gone
from tokenspeed.frontend.http.body import read_json
from tokenspeed.frontend.http.common import check_model, id_header, request_id
from tokenspeed.frontend.http.conversation import prepare_conversation
from tokenspeed.frontend.http.errors import JSON, failure, faulty
from tokenspeed.frontend.http.parse import shape_of
from tokenspeed.frontend.http.response_store import Kept
from tokenspeed.frontend.http.responses_answer import ResponseAnswer, new_reply
from tokenspeed.frontend.http.responses_chat import chat_of, input_messages
from tokenspeed.frontend.http.responses_schema import Deleted, ResponsesRequest
from tokenspeed.frontend.http.stream import EventStream, EventStyle, named_event
from tokenspeed.plane.checks import fault

SHAPE = shape_of(ResponsesRequest)


async def create_response(api: Api, request: Request) -> Response:
    fields = SHAPE.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    check_model(api, fields.model)
    _check(api, fields)
    client_id = request_id(request, fields.request_id)
    earlier = [] if fields.previous_response_id is None else _earlier(api, fields.previous_response_id)
    items = input_messages(fields.input)
    prepared = await prepare_conversation(api, chat_of(fields, earlier, items), field="input")
    kept = Kept(reply=new_reply(api, fields), messages=[*earlier, *items])
    answer = ResponseAnswer(api=api, reader=prepared.reader, kept=kept, prompt_tokens=len(prepared.inp.prompt_ids))
    call = CallName(answer=kept.reply.id, client=client_id)
    if fields.stream:
        style = EventStyle(encode=named_event, failed=answer.failed, end=b"")
        return EventStream(
            partial(api.service.stream, prepared.inp, call),
            events=lambda delta: style.events(answer.events(delta)),
            last=lambda: _stored(api, fields, answer),
            limit_s=api.settings.request_timeout_s,
            headers=id_header(call),
            style=style,
        )
    deltas = api.service.stream(prepared.inp, call)
    if fields.background:
        api.enter()  # the work outlives this request and keeps a place of its own
        api.responses.start(kept, _in_background(api, answer, deltas))
    else:
        await unless_gone(request.receive, _consume(answer, deltas))
        for _ in _stored(api, fields, answer):
            pass
    response = Response(msgspec.json.encode(kept.reply), media_type=JSON)
    response.raw_headers += id_header(call)
    return response


def _check(api: Api, fields: ResponsesRequest) -> None:
    stored = fields.store and api.settings.max_stored_responses > 0
    if fields.background and not stored:
        raise faulty([fault("background", True, "false, where the response is not stored")])
    if fields.background and fields.stream:
        raise faulty([fault("stream", True, "false, where the response is made in the background")])


def _earlier(api: Api, ident: str) -> list[dict[str, object]]:
    """Raises: RequestError: 404; 400, it is not complete."""
    try:
        kept = api.responses.get(ident)
    except RequestError as exc:
        raise RequestError(str(exc), status=404, field="previous_response_id") from None
    if kept.reply.status not in ("completed", "incomplete"):
        told = f"{ident} ({kept.reply.status})"
        raise faulty([fault("previous_response_id", told, "the id of a response that is complete")])
    return list(kept.messages)


def _stored(api: Api, fields: ResponsesRequest, answer: ResponseAnswer) -> Iterable[object]:
    """Keep a response that ended, and tell its end."""
    if fields.store and api.settings.max_stored_responses:
        api.responses.put(answer.kept)
    return answer.last()


async def _consume(answer: ResponseAnswer, deltas: AsyncGenerator[ChoiceDelta, None]) -> None:
    async with aclosing(deltas):
        async for delta in deltas:
            for _ in answer.events(delta):
                pass


async def _in_background(api: Api, answer: ResponseAnswer, deltas: AsyncGenerator[ChoiceDelta, None]) -> None:
    try:
        await _consume(answer, deltas)
    except asyncio.CancelledError:
        answer.kept.reply.status = "cancelled"
    except Exception as exc:  # told to whoever asks for the response
        answer.fail(failure(exc))
    finally:
        api.leave()
        api.responses.finished(answer.kept)


async def get_response(api: Api, request: Request) -> Response:
    """A stored response, as far as it is."""
    return _json(api.responses.get(request.path_params["response_id"]).reply)


async def cancel_response(api: Api, request: Request) -> Response:
    """End a response that is made in the background; one that ended already stays as it is."""
    kept = api.responses.get(request.path_params["response_id"])
    if not kept.reply.background:
        raise faulty([fault("response_id", kept.reply.id, "the id of a response made in the background")])
    if kept.task is not None:
        kept.task.cancel()
        await asyncio.wait((kept.task,))
    return _json(kept.reply)


async def delete_response(api: Api, request: Request) -> Response:
    ident = request.path_params["response_id"]
    api.responses.delete(ident)
    return _json(Deleted(id=ident))


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)
