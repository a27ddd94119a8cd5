"""POST /v1/completions: texts or token ids in, text out; echo, log-probabilities, several prompts and choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from tokenspeed.frontend.http.common import (
    check_inputs,
    check_model,
    cut_to,
    id_header,
    input_of,
    request_id,
    sampling_of,
)
from tokenspeed.frontend.http.errors import JSON, faulty
from tokenspeed.frontend.http.parse import shape_of
from tokenspeed.frontend.http.replies import Completion, CompletionChoice, CompletionLogprobs
from tokenspeed.frontend.http.schema import CompletionRequest
from tokenspeed.frontend.http.stream import EventStream, EventStyle, TextFrames
from tokenspeed.frontend.http.usage import UsageTally
from tokenspeed.plane.checks import fault, token_faults

SHAPE = shape_of(CompletionRequest)
STYLE = EventStyle()
DEFAULT_MAX_TOKENS = 16
"""What the API documents for completions without max_tokens."""


async def create_completion(api: Api, request: Request) -> Response:
    fields = SHAPE.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    check_model(api, fields.model)
    client_id = request_id(request, fields.request_id)
    answer = await _prepare(api, fields)
    call = CallName(answer=answer.answer_id, client=client_id)
    if fields.stream:
        return EventStream(
            partial(api.service.stream_batch, answer.inputs, call),
            events=answer.events,
            last=answer.last,
            limit_s=api.settings.request_timeout_s,
            headers=id_header(call),
        )
    choices = await unless_gone(request.receive, api.service.run_batch(answer.inputs, call))
    body = msgspec.json.encode(answer.whole(choices))
    response = Response(body, media_type=JSON)
    response.raw_headers += id_header(call)
    return response


@attrs.frozen(kw_only=True, eq=False)
class CompletionAnswer:
    """Builds the answer to one call.

    Attributes:
        echoes: text of each prompt, shown before its output if asked for.
        silent: nothing was to be generated; the one token the engine needs to make is not shown.
        text_only: chunks of a choice between its first and its last differ in their text alone.
    """

    api: Api
    fields: CompletionRequest
    answer_id: str
    created: int
    inputs: tuple[GenerationInput, ...]
    echoes: tuple[str, ...]
    silent: bool
    text_only: bool
    tally: UsageTally
    frames: TextFrames = attrs.field(factory=lambda: TextFrames(key="text"))

    def events(self, delta: ChoiceDelta) -> bytes:
        """The events of a delta."""
        if not self.text_only or delta.finish_reason is not None:
            return STYLE.events(self.chunks(delta))
        place, text = (delta.prompt_index, delta.index), delta.text
        made = self.frames.event(place, text) if text else b""
        if made is None:
            first = place not in self.tally.completion
            made = STYLE.events(self.chunks(delta))
            if not first:
                self.frames.learn(place, text, made)
        return made

    def chunks(self, delta: ChoiceDelta) -> Iterable[msgspec.Struct]:
        """The chunk of a delta, if it has anything to say."""
        first = (delta.prompt_index, delta.index) not in self.tally.completion
        if self.silent:
            if not first:
                return
            delta = _silenced(delta)
        self.tally.add(delta)
        body = self._chunk(delta, first=first)
        (choice,) = body.choices
        if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids or first:
            yield body

    def _chunk(self, delta: ChoiceDelta, *, first: bool) -> Completion:
        options = self.fields.stream_options
        body = self._body([self._choice(delta, first=first)])
        if options is not None and options.continuous_usage_stats:
            body.usage = self.tally.usage()
        elif options is not None and options.include_usage:
            body.usage = None
        return body

    def last(self) -> Iterable[msgspec.Struct]:
        options = self.fields.stream_options
        if options is not None and options.include_usage:
            body = self._body([])
            body.usage = self.tally.usage()
            yield body

    def whole(self, results: Sequence[Sequence[ChoiceResult]]) -> Completion:
        choices = []
        for result in (choice for prompt in results for choice in prompt):
            shown = _silenced(result) if self.silent else result
            self.tally.add(shown)
            choices.append(self._choice(shown, first=True))
        body = self._body(choices)
        body.usage = self.tally.usage()
        return body

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.answer_id, created=self.created, model=self.api.model, choices=choices)

    def _choice(self, delta: ChoiceDelta | ChoiceResult, *, first: bool) -> CompletionChoice:
        fields, inp = self.fields, self.inputs[delta.prompt_index]
        echo = self.echoes[delta.prompt_index] if first and fields.echo else ""
        choice = CompletionChoice(
            index=delta.prompt_index * fields.n + delta.index,
            text=echo + delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if fields.logprobs is not None:
            choice.logprobs = self._logprobs(delta, first=first)
        if first and fields.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = self.api.words.prompt(delta.prompt_logprobs)
        if fields.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            choice.prompt_token_ids = inp.prompt_ids.tolist() if first else UNSET
        return choice

    def _logprobs(self, delta: ChoiceDelta | ChoiceResult, *, first: bool) -> CompletionLogprobs:
        """The columns of the new tokens, behind those of the prompt where it is echoed."""
        words, inp = self.api.words, self.inputs[delta.prompt_index]
        echo = self.echoes[delta.prompt_index] if self.fields.echo else ""
        columns = words.completion(delta.logprobs, None, shift=len(echo))
        if not (first and self.fields.echo and delta.prompt_logprobs):
            return columns
        ids = inp.prompt_ids.tolist()
        # The ids may begin with tokens (BOS) that the echoed text does not show.
        unseen = len(self.api.prompts.tokenizer.decode(ids, skip_special_tokens=False)) - len(echo)
        return joined(words.completion(delta.prompt_logprobs, ids[0], shift=-unseen), columns)


def joined(left: CompletionLogprobs, right: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=left.tokens + right.tokens,
        token_logprobs=left.token_logprobs + right.token_logprobs,
        top_logprobs=left.top_logprobs + right.top_logprobs,
        text_offset=left.text_offset + right.text_offset,
    )


async def _prepare(api: Api, fields: CompletionRequest) -> CompletionAnswer:
    """Validate and tokenize the whole call; nothing was sent to the engine when this raises."""
    silent = fields.max_tokens == 0
    if silent and not fields.echo:
        raise faulty([fault("max_tokens", 0, "at least 1, or 0 together with echo")])
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    sampling = sampling_of(fields, max(wanted, 1), api.prompts.tokenizer)
    echo_logprobs = fields.logprobs if fields.echo else None
    asked = [top for top in (echo_logprobs, fields.prompt_logprobs) if top is not None]
    inputs, echoes = [], []
    for name, prompt in _prompts(fields.prompt):
        if isinstance(prompt, str):
            ids = await api.prompts.from_text(
                prompt,
                add_special_tokens=fields.add_special_tokens,
                field=name,
                any_length=fields.truncate_prompt_tokens is not None,
            )
        else:
            ids = prompt
            if found := token_faults(name, ids, vocab_size=api.service.info.vocab_size):
                raise faulty(found)
        ids = list(cut_to(fields, ids, max_tokens=max(wanted, 1), most=api.service.info.max_model_len))
        inputs.append(
            input_of(fields, ids, sampling=sampling, logprobs=fields.logprobs, prompt_logprobs=max(asked, default=None))
        )
        whole = isinstance(prompt, str) and fields.truncate_prompt_tokens is None
        echoes.append(prompt if isinstance(prompt, str) and whole else _decoded(api, fields, ids))
    check_inputs(api, inputs, field="prompt")
    return CompletionAnswer(
        api=api,
        fields=fields,
        answer_id=f"cmpl-{api.new_id()}",
        created=int(api.wall_s()),
        inputs=tuple(inputs),
        echoes=tuple(echoes),
        silent=silent,
        text_only=not silent and _text_only(fields),
        tally=UsageTally(prompt_tokens=sum(len(inp.prompt_ids) for inp in inputs)),
    )


def _text_only(fields: CompletionRequest) -> bool:
    continuous = fields.stream_options is not None and fields.stream_options.continuous_usage_stats
    return fields.logprobs is None and not fields.return_token_ids and not continuous


def _decoded(api: Api, fields: CompletionRequest, ids: list[int]) -> str:
    if not fields.echo:
        return ""
    return api.prompts.tokenizer.decode(ids, skip_special_tokens=fields.skip_special_tokens)


def _prompts(given: str | list[str | int | list[int]]) -> list[tuple[str, str | list[int]]]:
    """The prompts of a call, each with its name.

    Raises: RequestError: none, an empty one, or kinds that do not go together.
    """
    allowed = "a text, a list of token ids, or a list of texts or of lists of token ids; none of them empty"
    if isinstance(given, str):
        named: list[tuple[str, str | list[int]]] = [("prompt", given)]
    elif all(isinstance(item, int) for item in given):
        named = [("prompt", [item for item in given if isinstance(item, int)])]
    else:
        named = [(f"prompt[{at}]", item) for at, item in enumerate(given) if not isinstance(item, int)]
        if len(named) < len(given):
            raise faulty([fault("prompt", given, allowed)])
    if empty := [fault(name, prompt, allowed) for name, prompt in named if not prompt]:
        raise faulty(empty)
    return named


def _silenced(delta: ChoiceDelta | ChoiceResult) -> ChoiceDelta:
    return ChoiceDelta(
        prompt_index=delta.prompt_index,
        index=delta.index,
        text="",
        token_ids=(),
        finish_reason="length",
        prompt_logprobs=delta.prompt_logprobs,
        prompt_tokens=delta.prompt_tokens,
        cached_tokens=delta.cached_tokens,
    )
