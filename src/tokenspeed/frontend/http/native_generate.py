"""POST /generate: SGLang's own form of generation, for trainers: token ids in and out, log-probabilities, versions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.calls import CallName
from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult, GenerationInput, PromptLogprobs, TokenLogprob
from tokenspeed.frontend.http.api import Api, unless_gone
from tokenspeed.frontend.http.body import Decoded, read_json
from tokenspeed.frontend.http.common import bias_of, check_inputs, id_header, request_id
from tokenspeed.frontend.http.errors import JSON, faulty
from tokenspeed.frontend.http.native_schema import (
    FinishReason,
    Generated,
    GenerateFields,
    MetaInfo,
    NativeSampling,
    Triple,
)
from tokenspeed.frontend.http.parse import shape_of
from tokenspeed.frontend.http.stream import EventStream, event
from tokenspeed.plane.checks import fault, token_faults
from tokenspeed.plane.messages import SamplingParams, frozen_tokens

T = TypeVar("T")

FIELDS = shape_of(GenerateFields)
SAMPLING = shape_of(NativeSampling)


async def generate(api: Api, request: Request) -> Response:
    fields = FIELDS.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    client_id = request_id(request, None)
    inputs, silent = await _inputs(api, fields)
    answer = NativeAnswer(
        api=api, fields=fields, inputs=inputs, silent=silent, call_id=api.new_id(), began_s=api.wall_s()
    )
    call = CallName(answer=answer.call_id, client=client_id)
    if fields.stream:
        return EventStream(
            partial(api.service.stream_batch, answer.inputs, call),
            events=answer.event,
            last=lambda: (),
            limit_s=api.settings.request_timeout_s,
            headers=id_header(call),
        )
    found = await unless_gone(request.receive, api.service.run_batch(answer.inputs, call))
    whole = [answer.whole(result) for results in found for result in results]
    response = Response(msgspec.json.encode(whole if answer.listed else whole[0]), media_type=JSON)
    response.raw_headers += id_header(call)
    return response


@attrs.define(eq=False)
class SoFar:
    """What a stream has said of its sequences, by place. Writer: NativeAnswer."""

    deltas: dict[int, list[ChoiceDelta]] = attrs.field(factory=dict[int, list[ChoiceDelta]])


@attrs.frozen(kw_only=True, eq=False)
class NativeAnswer:
    """Builds the answer to one call.

    Attributes:
        silent: prompts, by place, whose one token nobody asked for.
        call_id: names sequences that the client gave no name.
    """

    api: Api
    fields: GenerateFields
    inputs: tuple[GenerationInput, ...]
    silent: frozenset[int]
    call_id: str
    began_s: float
    so_far: SoFar = attrs.field(factory=SoFar)

    @property
    def listed(self) -> bool:
        """The answer is an array: several prompts, or several choices."""
        given = self.fields.text if self.fields.text is not None else self.fields.input_ids
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        return several or sum(inp.n for inp in self.inputs) > 1

    def event(self, delta: ChoiceDelta) -> bytes:
        """All of the sequence so far, as clients of this form expect."""
        place = self._place(delta)
        said = self.so_far.deltas.setdefault(place, [])
        said.append(delta)
        body = self.whole(_merged(said))
        if self.listed:
            body.index = place
        return event(body)

    def whole(self, result: ChoiceResult | ChoiceDelta) -> Generated:
        if result.prompt_index in self.silent:
            result = _unsaid(result)
        return Generated(text=result.text, output_ids=list(result.token_ids), meta_info=self._meta(result))

    def _place(self, result: ChoiceResult | ChoiceDelta) -> int:
        return sum(inp.n for inp in self.inputs[: result.prompt_index]) + result.index

    def _meta(self, result: ChoiceResult | ChoiceDelta) -> MetaInfo:
        place = self._place(result)
        meta = MetaInfo(
            id=self.inputs[result.prompt_index].name or (f"{self.call_id}-{place}" if self.listed else self.call_id),
            finish_reason=_finish(result),
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            cached_tokens=result.cached_tokens,
            weight_version=result.weight_version or self.api.service.weight_version,
            e2e_latency=max(0.0, self.api.wall_s() - self.began_s),
        )
        if self.fields.return_logprob:
            self._add_logprobs(meta, result)
        return meta

    def _add_logprobs(self, meta: MetaInfo, result: ChoiceResult | ChoiceDelta) -> None:
        meta.output_token_logprobs = [self._triple(entry.token_id, entry.logprob) for entry in result.logprobs]
        prompt = self._prompt(result)
        meta.input_token_logprobs = [
            self._triple(token, None if entry is None else entry.logprob) for token, entry in prompt
        ]
        if self.fields.top_logprobs_num:
            meta.output_top_logprobs = [self._top(entry) for entry in result.logprobs]
            meta.input_top_logprobs = [None if entry is None else self._top(entry) for _, entry in prompt]

    def _prompt(self, result: ChoiceResult | ChoiceDelta) -> list[tuple[int, TokenLogprob | None]]:
        """Prompt positions from `logprob_start_len` on, with their ids."""
        entries: PromptLogprobs = result.prompt_logprobs or ()
        ids = self.inputs[result.prompt_index].prompt_ids.tolist()
        start = max(self.fields.logprob_start_len, 0)
        return list(zip(ids, entries, strict=True))[start:] if entries else []

    def _top(self, entry: TokenLogprob) -> list[Triple]:
        return [self._triple(token, value) for token, value in entry.top]

    def _triple(self, token: int, value: float | None) -> Triple:
        return value, token, self.api.words.text(token) if self.fields.return_text_in_logprobs else None


def _merged(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """The deltas of one choice as one."""
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
    )


def _unsaid(result: ChoiceResult | ChoiceDelta) -> ChoiceDelta:
    """What is told of a sequence that was to get no token: an engine makes one, and with it the prompt's scores."""
    return ChoiceDelta(
        prompt_index=result.prompt_index,
        index=result.index,
        text="",
        token_ids=(),
        finish_reason=None if result.finish_reason is None else "length",
        prompt_logprobs=result.prompt_logprobs,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        weight_version=result.weight_version,
    )


def _finish(result: ChoiceResult | ChoiceDelta) -> FinishReason | None:
    match result.finish_reason:
        case None:
            return None
        case "length":
            return FinishReason(type="length", length=result.completion_tokens)
        case "stop":
            return FinishReason(type="stop", matched=_matched(result))
        case other:
            return FinishReason(type=other, message="the request was aborted")


def _matched(result: ChoiceResult | ChoiceDelta) -> str | int | None:
    """The stop string or id; the model's own end is the last token."""
    if result.stop_reason is not None:
        return result.stop_reason
    return result.token_ids[-1] if result.token_ids else None


async def _inputs(api: Api, fields: GenerateFields) -> tuple[tuple[GenerationInput, ...], frozenset[int]]:
    """Validate and tokenize the whole call; nothing was sent to the engine when this raises.

    Returns: the inputs, and the places of those that are to get no token.
    """
    prompts = await _prompts(api, fields)
    count = len(prompts)
    given = [{}] * count if fields.sampling_params is None else _each(fields.sampling_params, count, "sampling_params")
    names = [""] * count if fields.rid is None else _each(fields.rid, count, "rid")
    read = {id(said): SAMPLING.read(Decoded(fields=said)) for said in given}  # one for all prompts is read once
    sampling = [read[id(said)] for said in given]
    inputs = tuple(_input(fields, ids, name, said) for ids, said, name in zip(prompts, sampling, names, strict=True))
    check_inputs(api, inputs, field="text" if fields.text is not None else "input_ids")
    return inputs, frozenset(at for at, said in enumerate(sampling) if said.max_new_tokens == 0)


async def _prompts(api: Api, fields: GenerateFields) -> list[list[int]]:
    """Raises: RequestError: none or both kinds, an empty one, ids outside the vocabulary."""
    if (fields.text is None) == (fields.input_ids is None):
        raise faulty([fault("text", fields.text, "either text or input_ids")])
    if fields.text is not None:
        texts = [fields.text] if isinstance(fields.text, str) else fields.text
        if not texts or not all(texts):
            raise faulty([fault("text", fields.text, "a text, or a list of them; none empty")])
        return [
            await api.prompts.from_text(
                text, add_special_tokens=True, field="text" if len(texts) == 1 else f"text[{at}]"
            )
            for at, text in enumerate(texts)
        ]
    ids = fields.input_ids or []
    listed = [list(one) for one in ids if isinstance(one, list)]
    if listed and len(listed) < len(ids):
        raise faulty([fault("input_ids", ids, "token ids, or lists of them; not both")])
    prompts = listed or [[token for token in ids if isinstance(token, int)]]
    for at, prompt in enumerate(prompts):
        name = f"input_ids[{at}]" if listed else "input_ids"
        if not prompt:
            raise faulty([fault(name, prompt, "at least one token id")])
        if found := token_faults(name, prompt, vocab_size=api.service.info.vocab_size):
            raise faulty(found)
    return prompts


def _each(given: T | list[T], count: int, field: str) -> list[T]:
    """One value for all prompts, or one for each."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise faulty([fault(field, f"{len(given)} of them", f"one, or as many as there are prompts ({count})")])
    return given


def _input(fields: GenerateFields, ids: Sequence[int], name: str, said: NativeSampling) -> GenerationInput:
    stop = said.stop
    return GenerationInput(
        prompt_ids=frozen_tokens(ids),
        sampling=SamplingParams(
            max_new_tokens=max(said.max_new_tokens, 1),
            min_new_tokens=said.min_new_tokens,
            temperature=said.temperature,
            top_p=said.top_p,
            top_k=said.top_k,
            min_p=said.min_p,
            frequency_penalty=said.frequency_penalty,
            presence_penalty=said.presence_penalty,
            repetition_penalty=said.repetition_penalty,
            logit_bias=bias_of(said.logit_bias),
            seed=said.seed if said.seed is not None else said.sampling_seed,
            stop_token_ids=tuple(said.stop_token_ids),
            ignore_eos=said.ignore_eos,
            json_schema=said.json_schema,
            regex=said.regex,
            ebnf=said.ebnf,
            structural_tag=said.structural_tag,
        ),
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=said.no_stop_trim,
        n=said.n,
        logprobs=fields.top_logprobs_num if fields.return_logprob else None,
        prompt_logprobs=fields.top_logprobs_num if fields.return_logprob and fields.logprob_start_len >= 0 else None,
        skip_special_tokens=said.skip_special_tokens,
        cache_salt=(fields.cache_salt or "").encode(),
        priority=fields.priority,
        name=name,
    )
