"""POST /v1/messages and /v1/messages/count_tokens: the messages API, over the same conversation as chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.calls import CallName
from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult
from tokenspeed.frontend.http.api import Api, unless_gone
from tokenspeed.frontend.http.blocks import Block, BlockRow, Step, StepKind
from tokenspeed.frontend.http.body import read_json
from tokenspeed.frontend.http.common import check_model, id_header, request_id
from tokenspeed.frontend.http.conversation import OutputReader, prepare_conversation
from tokenspeed.frontend.http.errors import JSON, Failure
from tokenspeed.frontend.http.messages_chat import chat_of
from tokenspeed.frontend.http.messages_schema import (
    CountedTokens,
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    MessageUsage,
)
from tokenspeed.frontend.http.parse import shape_of
from tokenspeed.frontend.http.stream import EventStream, EventStyle, named_event
from tokenspeed.frontend.text.output.parts import PartKind

SHAPE = shape_of(MessagesRequest)
COUNT_SHAPE = shape_of(CountTokensRequest)
REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn", "abort": "end_turn"}


async def create_message(api: Api, request: Request) -> Response:
    fields = SHAPE.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    check_model(api, fields.model)
    client_id = request_id(request, fields.request_id)
    prepared = await prepare_conversation(api, chat_of(fields))
    answer = MessageAnswer(
        api=api,
        answer_id=f"msg_{api.new_id()}",
        reader=prepared.reader,
        prompt_tokens=len(prepared.inp.prompt_ids),
    )
    call = CallName(answer=answer.answer_id, client=client_id)
    if fields.stream:
        return EventStream(
            partial(api.service.stream, prepared.inp, call),
            events=lambda delta: STYLE.events(answer.events(delta)),
            last=answer.last,
            limit_s=api.settings.request_timeout_s,
            headers=id_header(call),
            style=STYLE,
        )
    (result,) = await unless_gone(request.receive, api.service.run(prepared.inp, call))
    response = Response(msgspec.json.encode(answer.whole(result)), media_type=JSON)
    response.raw_headers += id_header(call)
    return response


async def count_tokens(api: Api, request: Request) -> Response:
    """Tokens of the prompt that the same request would make; nothing is generated."""
    fields = COUNT_SHAPE.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    check_model(api, fields.model)
    chat = chat_of(fields)
    chat.max_tokens = 1
    prepared = await prepare_conversation(api, chat)
    return Response(msgspec.json.encode(CountedTokens(input_tokens=len(prepared.inp.prompt_ids))), media_type=JSON)


def _failed(found: Failure) -> object:
    return {"type": "error", "error": found.body.error}


STYLE = EventStyle(encode=named_event, failed=_failed, end=b"")


@attrs.define(eq=False)
class MessageState:
    """Writer: MessageAnswer. `latest`: the last delta that came."""

    row: BlockRow = attrs.field(factory=BlockRow)
    latest: ChoiceDelta | None = None


@attrs.frozen(kw_only=True, eq=False)
class MessageAnswer:
    """Builds the answer to one call."""

    api: Api
    answer_id: str
    reader: OutputReader
    prompt_tokens: int
    state: MessageState = attrs.field(factory=MessageState)

    def events(self, delta: ChoiceDelta) -> Iterable[object]:
        """The events of a delta; the message begins with the first."""
        if self.state.latest is None:
            begun = self._reply(delta, blocks=[], reason=None)
            begun.usage.output_tokens = 0
            yield {"type": "message_start", "message": begun}
        self.state.latest = delta
        for part in self.reader.read(delta):
            for step in self.state.row.take(part, self._ident(part.kind)):
                yield from _step_events(step)

    def last(self) -> Iterable[object]:
        for step in self.state.row.close():
            yield from _step_events(step)
        delta = self.state.latest
        if delta is None:
            return
        ended = self._reply(delta, blocks=[], reason=self.reader.finish_reason(delta))
        told = {"stop_reason": ended.stop_reason, "stop_sequence": ended.stop_sequence}
        yield {"type": "message_delta", "delta": told, "usage": ended.usage}
        yield {"type": "message_stop"}

    def whole(self, result: ChoiceResult) -> MessageReply:
        for part in self.reader.read(result):
            for _ in self.state.row.take(part, self._ident(part.kind)):
                pass
        return self._reply(result, blocks=self.state.row.blocks, reason=self.reader.finish_reason(result))

    def _ident(self, kind: PartKind) -> str:
        return f"toolu_{self.api.new_id()}" if kind is PartKind.CALL else ""

    def _reply(self, delta: ChoiceDelta | ChoiceResult, *, blocks: list[Block], reason: str | None) -> MessageReply:
        stopped = delta.stop_reason if isinstance(delta.stop_reason, str) and reason == "stop" else None
        cached = min(delta.cached_tokens, self.prompt_tokens)
        return MessageReply(
            id=self.answer_id,
            model=self.api.model,
            content=[_block(block, whole=True) for block in blocks],
            stop_reason=None if reason is None else "stop_sequence" if stopped else REASONS[reason],
            stop_sequence=stopped,
            usage=MessageUsage(
                input_tokens=self.prompt_tokens - cached,
                output_tokens=delta.completion_tokens,
                cache_read_input_tokens=cached,
            ),
        )


def _block(block: Block, *, whole: bool) -> dict[str, object]:
    """A content block; without its text where it begins in a stream."""
    text = block.text if whole else ""
    match block.kind:
        case PartKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case PartKind.CALL:
            return {"type": "tool_use", "id": block.ident, "name": block.name, "input": _input(text)}
        case _:
            return {"type": "text", "text": text}


def _input(text: str) -> object:
    """Arguments as an object; {} for what was cut off."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _step_events(step: Step) -> Iterator[object]:
    at = step.block.index
    match step.kind:
        case StepKind.OPEN:
            yield {"type": "content_block_start", "index": at, "content_block": _block(step.block, whole=False)}
        case StepKind.GROW:
            yield {"type": "content_block_delta", "index": at, "delta": _delta(step)}
        case StepKind.CLOSE:
            yield {"type": "content_block_stop", "index": at}


def _delta(step: Step) -> dict[str, object]:
    match step.block.kind:
        case PartKind.REASONING:
            return {"type": "thinking_delta", "thinking": step.text}
        case PartKind.CALL:
            return {"type": "input_json_delta", "partial_json": step.text}
        case _:
            return {"type": "text_delta", "text": step.text}
