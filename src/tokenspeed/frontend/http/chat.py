"""POST /v1/chat/completions: a conversation in, the model's answer out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs
import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.calls import CallName
from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult, GenerationInput
from tokenspeed.frontend.http.api import Api, unless_gone
from tokenspeed.frontend.http.body import read_json
from tokenspeed.frontend.http.common import check_model, id_header, request_id
from tokenspeed.frontend.http.conversation import OutputReader, prepare_conversation
from tokenspeed.frontend.http.errors import JSON
from tokenspeed.frontend.http.parse import shape_of
from tokenspeed.frontend.http.replies import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from tokenspeed.frontend.http.schema import ChatRequest
from tokenspeed.frontend.http.stream import EventStream, TextFrames, event
from tokenspeed.frontend.http.usage import UsageTally
from tokenspeed.frontend.text.output.parts import Part, PartKind

SHAPE = shape_of(ChatRequest)
ROLE = "assistant"


async def create_chat_completion(api: Api, request: Request) -> Response:
    fields = SHAPE.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    check_model(api, fields.model)
    client_id = request_id(request, fields.request_id)
    prepared = await prepare_conversation(api, fields)
    answer = ChatAnswer(
        api=api,
        fields=fields,
        answer_id=f"chatcmpl-{api.new_id()}",
        created=int(api.wall_s()),
        inp=prepared.inp,
        reader=prepared.reader,
        tally=UsageTally(prompt_tokens=len(prepared.inp.prompt_ids)),
    )
    call = CallName(answer=answer.answer_id, client=client_id)
    if fields.stream:
        return EventStream(
            partial(api.service.stream, answer.inp, call),
            events=answer.events,
            last=answer.last,
            limit_s=api.settings.request_timeout_s,
            headers=id_header(call),
        )
    choices = await unless_gone(request.receive, api.service.run(answer.inp, call))
    response = Response(msgspec.json.encode(answer.whole(choices)), media_type=JSON)
    response.raw_headers += id_header(call)
    return response


@attrs.frozen(kw_only=True, eq=False)
class ChatAnswer:
    """Builds the answer to one call."""

    api: Api
    fields: ChatRequest
    answer_id: str
    created: int
    inp: GenerationInput
    reader: OutputReader
    tally: UsageTally
    frames: TextFrames = attrs.field(factory=lambda: TextFrames(key="content"))

    def events(self, delta: ChoiceDelta) -> bytes:
        """The event of a delta, if it has anything to say; a choice's first one carries the role."""
        place, options = (delta.prompt_index, delta.index), self.fields.stream_options
        first = place not in self.tally.completion
        parts = self.reader.read(delta)
        self.tally.add(delta)
        if (
            not (first or delta.finish_reason or delta.logprobs or self.fields.return_token_ids)
            and not (options is not None and options.continuous_usage_stats)
            and all(part.kind is PartKind.TEXT for part in parts)
        ):
            text = "".join([part.text for part in parts])
            made = self.frames.event(place, text) if text else b""
            return made if made is not None else self.frames.learn(place, text, self._event(delta, parts, first=False))
        return self._event(delta, parts, first=first)

    def _event(self, delta: ChoiceDelta, parts: Sequence[Part], *, first: bool) -> bytes:
        fields, text = self.fields, joined_text(parts, PartKind.TEXT)
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(
                role=ROLE if first else UNSET,
                content=text if first or text else UNSET,
                reasoning_content=joined_text(parts, PartKind.REASONING) or UNSET,
                tool_calls=_call_deltas(parts, self.api.new_id) or UNSET,
            ),
            logprobs=self._logprobs(delta) if delta.logprobs else None,
            finish_reason=self.reader.finish_reason(delta),
            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            token_ids=list(delta.token_ids) if fields.return_token_ids else UNSET,
        )
        if not (first or parts or choice.logprobs or choice.token_ids or choice.finish_reason):
            return b""
        body = self._chunk([choice])
        if first and delta.index == 0 and fields.return_token_ids:
            body.prompt_token_ids = self.inp.prompt_ids.tolist()
        options = fields.stream_options
        if options is not None and options.continuous_usage_stats:
            body.usage = self.tally.usage()
        elif options is not None and options.include_usage:
            body.usage = None
        return event(body)

    def last(self) -> Iterable[msgspec.Struct]:
        options = self.fields.stream_options
        if options is not None and options.include_usage:
            body = self._chunk([])
            body.usage = self.tally.usage()
            yield body

    def whole(self, results: Sequence[ChoiceResult]) -> ChatCompletion:
        fields = self.fields
        for result in results:
            self.tally.add(result)
        body = ChatCompletion(
            id=self.answer_id,
            created=self.created,
            model=self.api.model,
            choices=[self._choice(result) for result in results],
            usage=self.tally.usage(),
        )
        if fields.return_token_ids:
            body.prompt_token_ids = self.inp.prompt_ids.tolist()
        if fields.prompt_logprobs is not None and results[0].prompt_logprobs is not None:
            body.prompt_logprobs = self.api.words.prompt(results[0].prompt_logprobs)
        return body

    def _choice(self, result: ChoiceResult) -> ChatChoice:
        parts = self.reader.read(result)
        text, calls = joined_text(parts, PartKind.TEXT), _tool_calls(parts, self.api.new_id)
        return ChatChoice(
            index=result.index,
            message=ChatMessage(
                role=ROLE,
                content=None if calls and not text else text,
                reasoning_content=joined_text(parts, PartKind.REASONING) or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(result) if self.fields.logprobs else None,
            finish_reason=self.reader.finish_reason(result) or result.finish_reason,
            stop_reason=result.stop_reason,
            token_ids=list(result.token_ids) if self.fields.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: ChoiceDelta | ChoiceResult) -> ChatLogprobs:
        return self.api.words.chat(delta.logprobs)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self.answer_id, created=self.created, model=self.api.model, choices=choices)


def _tool_calls(parts: Sequence[Part], new_id: Callable[[], str]) -> list[ToolCall]:
    calls: dict[int, ToolCall] = {}
    for part in parts:
        if part.kind is PartKind.CALL:
            called = CalledFunction(name=part.text, arguments="")
            calls[part.call] = ToolCall(id=f"call_{new_id()}", function=called)
        elif part.kind is PartKind.ARGUMENTS:
            calls[part.call].function.arguments += part.text
    return list(calls.values())


def _call_deltas(parts: Sequence[Part], new_id: Callable[[], str]) -> list[ToolCallDelta]:
    """The calls' pieces in one chunk, one entry a call."""
    found: dict[int, ToolCallDelta] = {}
    for part in parts:
        if part.kind is PartKind.CALL:
            begun = FunctionDelta(name=part.text, arguments="")
            found[part.call] = ToolCallDelta(index=part.call, id=f"call_{new_id()}", type="function", function=begun)
        elif part.kind is PartKind.ARGUMENTS:
            if part.call not in found:
                found[part.call] = ToolCallDelta(index=part.call, function=FunctionDelta(arguments=""))
            found[part.call].function.arguments += part.text
    return list(found.values())


def joined_text(parts: Sequence[Part], kind: PartKind) -> str:
    return "".join(part.text for part in parts if part.kind is kind)
