"""From request fields to generation inputs: what completions and chat completions share."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.requests import Request

from tokenspeed.frontend.calls import CallName
from tokenspeed.frontend.generation import GenerationInput
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.errors import HttpError, faulty
from tokenspeed.frontend.http.schema import MAX_REQUEST_ID_CHARS, GenerationFields
from tokenspeed.frontend.limits import input_faults
from tokenspeed.frontend.text.constraints import CONSTRAINT_FIELDS, bad_word_ids, constraint_of
from tokenspeed.frontend.text.tokenizer import TextTokenizer
from tokenspeed.plane.checks import Fault, fault, shown
from tokenspeed.plane.messages import SamplingParams, frozen_tokens

_PRINTABLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_KEY = re.compile(r"0|-?[1-9][0-9]{0,18}")


def check_model(api: Api, model: str | None) -> None:
    """Raises: RequestError: 404, another model than the one served."""
    if model is not None and model != api.model:
        raise HttpError(
            f"model: {shown(model)} is not served here; expected {api.model!r}",
            status=404,
            field="model",
            code="model_not_found",
        )


def request_id(request: Request, given: str | None) -> str:
    """What the client calls its request, "" if nothing; it identifies nothing here.

    Raises: RequestError: an id that cannot stand in a header, or an endless one.
    """
    name, value = "request_id", given
    if value is None:
        name, value = "X-Request-Id", request.headers.get("x-request-id")
    if value is None:
        return ""
    if not _PRINTABLE.fullmatch(value):
        raise faulty([fault(name, value, f"1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces")])
    return value


def id_header(call: CallName) -> tuple[tuple[bytes, bytes], ...]:
    """Echoes what the client calls its request. Who gave no name gets the answer's: the openai client shows it as
    ``_request_id``, and the log has both."""
    return ((b"x-request-id", (call.client or call.answer).encode()),)


def sampling_of(fields: GenerationFields, max_tokens: int | None, tokenizer: TextTokenizer) -> SamplingParams:
    """Raises: RequestError: a key of logit_bias is no integer, or what is to hold the answer is no grammar."""
    sampling = SamplingParams(
        max_new_tokens=max_tokens,
        min_new_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=bias_of(fields.logit_bias),
        seed=fields.seed,
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        bad_words=bad_word_ids(tokenizer, fields.bad_words) if fields.bad_words else (),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
    )
    constraint = constraint_of({name: getattr(fields, name) for name in CONSTRAINT_FIELDS})
    return sampling if constraint is None else constraint.into(sampling)


def input_of(
    fields: GenerationFields,
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> GenerationInput:
    """The input for one prompt whose ids are known to fit 32 bits."""
    stop = fields.stop
    return GenerationInput(
        prompt_ids=frozen_tokens(prompt_ids),
        sampling=sampling,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=fields.include_stop_str_in_output,
        n=fields.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens,
        cache_salt=(fields.cache_salt or "").encode(),
        priority=fields.priority,
        name=fields.request_id or "",
    )


def check_inputs(api: Api, inputs: Sequence[GenerationInput], *, field: str) -> None:
    """Raises: RequestError: 400 with every fault, before any part of the call runs."""
    found: dict[Fault, None] = {}
    for at, inp in enumerate(inputs):
        name = field if len(inputs) == 1 else f"{field}[{at}]"
        found.update(
            dict.fromkeys(input_faults(inp, api.service.info, max_choices=api.settings.max_choices, field=name))
        )
    if found:
        raise faulty(list(found))


def bias_of(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    faults = [fault("logit_bias key", key, "a token id") for key in given if not _KEY.fullmatch(key)]
    if faults:
        raise faulty(faults)
    return tuple((int(key), bias) for key, bias in given.items())


def cut_to(fields: GenerationFields, ids: Sequence[int], *, max_tokens: int | None, most: int) -> Sequence[int]:
    """The end of a prompt as long as `truncate_prompt_tokens` says; -1: as fits a context of `most` tokens."""
    kept = fields.truncate_prompt_tokens
    if kept is None:
        return ids
    if kept == -1:
        kept = max(most - max(max_tokens or 1, 1), 1)
    return ids[-kept:] if kept else ids
