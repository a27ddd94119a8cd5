"""POST /v1/chat/completions: a conversation in, the model's answer out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult, GenerationInput
from tokenspeed.frontend.http.api import Api, unless_gone
from tokenspeed.frontend.http.body import read_json
from tokenspeed.frontend.http.common import check_inputs, check_model, input_of, request_id, sampling_of
from tokenspeed.frontend.http.errors import JSON, faulty
from tokenspeed.frontend.http.messages import template_ready
from tokenspeed.frontend.http.parse import shape_of
from tokenspeed.frontend.http.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from tokenspeed.frontend.http.schema import ChatRequest
from tokenspeed.frontend.http.stream import EventStream
from tokenspeed.frontend.http.usage import UsageTally
from tokenspeed.plane.checks import Fault, fault, int_fault

SHAPE = shape_of(ChatRequest)
ROLE = "assistant"


async def create_chat_completion(api: Api, request: Request) -> Response:
    fields = SHAPE.read(await read_json(request, max_bytes=api.max_body_bytes))
    check_model(api, fields.model)
    echoed_id = request_id(request, fields.request_id)
    answer = await _prepare(api, fields)
    if fields.stream:
        return EventStream(
            api.service.stream(answer.inp),
            chunks=answer.chunks,
            last=answer.last,
            limit_s=api.settings.request_timeout_s,
            headers=echoed_id,
        )
    choices = await unless_gone(request.receive, api.service.run(answer.inp))
    response = Response(msgspec.json.encode(answer.whole(choices)), media_type=JSON)
    response.raw_headers += echoed_id
    return response


@attrs.frozen(kw_only=True, eq=False)
class ChatAnswer:
    """Builds the answer to one call."""

    api: Api
    fields: ChatRequest
    answer_id: str
    created: int
    inp: GenerationInput
    tally: UsageTally

    def chunks(self, delta: ChoiceDelta) -> Iterable[msgspec.Struct]:
        """The chunk of a delta, if it has anything to say; a choice's first one carries the role."""
        first = (delta.prompt_index, delta.index) not in self.tally.completion
        self.tally.add(delta)
        fields = self.fields
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(role=ROLE if first else UNSET, content=delta.text if first or delta.text else UNSET),
            logprobs=self._logprobs(delta) if delta.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
            token_ids=list(delta.token_ids) if fields.return_token_ids else UNSET,
        )
        if not (first or delta.text or choice.logprobs or choice.token_ids or choice.finish_reason):
            return
        body = self._chunk([choice])
        if first and delta.index == 0 and fields.return_token_ids:
            body.prompt_token_ids = self.inp.prompt_ids.tolist()
        options = fields.stream_options
        if options is not None and options.continuous_usage_stats:
            body.usage = self.tally.usage()
        elif options is not None and options.include_usage:
            body.usage = None
        yield body

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
        return ChatChoice(
            index=result.index,
            message=ChatMessage(role=ROLE, content=result.text),
            logprobs=self._logprobs(result) if self.fields.logprobs else None,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            token_ids=list(result.token_ids) if self.fields.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: ChoiceDelta | ChoiceResult) -> ChatLogprobs:
        return self.api.words.chat(delta.logprobs)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self.answer_id, created=self.created, model=self.api.model, choices=choices)


async def _prepare(api: Api, fields: ChatRequest) -> ChatAnswer:
    """Validate, template and tokenize the call; nothing was sent to the engine when this raises."""
    messages, faults = template_ready(fields.messages)
    faults += (*_format_faults(fields.response_format), *_logprob_faults(api, fields))
    most = api.service.info.max_model_len
    if len(messages) > most:
        faults += (fault("messages", f"{len(messages)} messages", f"at most {most}, the tokens of the context"),)
    if fields.stream and fields.prompt_logprobs is not None:
        faults += (fault("prompt_logprobs", fields.prompt_logprobs, "it to be left out of a streamed chat"),)
    if faults:
        raise faulty(faults)
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    sampling = sampling_of(fields, max_tokens)
    ids = await api.prompts.from_messages(
        messages, add_generation_prompt=fields.add_generation_prompt, extra=fields.chat_template_kwargs
    )
    inp = attrs.evolve(
        input_of(
            fields,
            ids,
            sampling=sampling,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            prompt_logprobs=fields.prompt_logprobs,
        ),
        continues_text=False,
    )
    check_inputs(api, [inp], field="messages")
    return ChatAnswer(
        api=api,
        fields=fields,
        answer_id=f"chatcmpl-{api.new_id()}",
        created=int(api.wall_s()),
        inp=inp,
        tally=UsageTally(prompt_tokens=len(inp.prompt_ids)),
    )


def _format_faults(given: Mapping[str, object] | None) -> Iterable[Fault]:
    if given is not None and given.get("type") != "text":
        yield fault("response_format", given, '{"type": "text"}; JSON formats are not supported yet')


def _logprob_faults(api: Api, fields: ChatRequest) -> Iterable[Fault]:
    if fields.top_logprobs is None:
        return
    info = api.service.info
    yield from int_fault("top_logprobs", fields.top_logprobs, 0, min(info.max_logprobs, info.vocab_size))
    if not fields.logprobs:
        yield fault("top_logprobs", fields.top_logprobs, "logprobs to be true as well")
