"""Requests: :class:`GenerateRequest` to the positional form and back."""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec

from tokenspeed.plane.messages import GenerateRequest, SamplingParams
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.layouts import REQUEST, SAMPLING, Layouts
from tokenspeed.wire.structs import (
    OwnParams,
    RequestStruct,
    SamplingStruct,
    laid_out,
    named,
    token_array,
    typed,
    untagged,
)

SHORTEST = 11
"""Elements that every request has, the tag included."""

_DEFAULTS: dict[str, object] = {
    "return_hidden_states": False,
    "created_time": 0.0,
    "cache_salt": b"",
    "priority": 0,
    "kind": "generate",
    "unsupported": (),
    "trace": "",
}
_NOT_SERVED = (
    "token_ids_logprob",
    "input_embeds",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "input_multi_ids",
    "input_extra_infos",
    "multimodal_inputs",
)
_SAMPLING_NOT_SERVED = ("stop", "stop_strs", "thinking_budget")
_OWN_KEY = "tokenspeed"
_OWN = ("bad_words", "allowed_token_ids", "processors")


class _Own(TypedDict, total=False):
    bad_words: tuple[tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...]
    processors: tuple[tuple[str, str], ...]


def encode_request(request: GenerateRequest, layouts: Layouts) -> list[object]:
    """The tagged array for an engine with these layouts, without trailing defaults.

    Raises: WireError: the request sets a field that the engine's layout has no place for.
    """
    values: dict[str, object] = {
        "rid": request.rid,
        "input_ids": request.input_ids.tolist(),
        "sampling_params": _encode_sampling(request.sampling, layouts),
        "return_logprob": request.return_logprob,
        "logprob_start_len": request.prompt_logprobs,
        "top_logprobs_num": request.top_logprobs,
        "stream": request.stream,
        "return_hidden_states": False,
        "created_time": request.created_s,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "kind": request.kind,
        "unsupported": request.unsupported,
        "trace": request.trace,  # nothing depends on it: an engine without a place for it goes without
    }
    for name in ("cache_salt", "priority", "kind", "unsupported"):
        if name not in layouts.request and values[name] != _DEFAULTS[name]:
            raise WireError(name, "the engine takes no such field")
    elements = [REQUEST, *laid_out(values, layouts.request)]
    names = ("", *layouts.request)
    while len(elements) > SHORTEST and elements[-1] == _DEFAULTS.get(names[len(elements) - 1]):
        elements.pop()
    return elements


def decode_request(values: object, layouts: Layouts) -> GenerateRequest:
    """Raises: WireError: names the field that cannot be read."""
    fields = named(untagged(values, REQUEST), layouts.request, REQUEST)
    if "sampling_params" in fields:
        fields["sampling_params"] = named(fields["sampling_params"], layouts.sampling, SAMPLING)
    got = typed(fields, RequestStruct, REQUEST)
    return GenerateRequest(
        rid=got.rid,
        input_ids=token_array(got.input_ids, REQUEST),
        sampling=_decode_sampling(got.sampling_params),
        return_logprob=got.return_logprob,
        top_logprobs=got.top_logprobs_num,
        prompt_logprobs=got.logprob_start_len,
        kind=got.kind,
        stream=got.stream,
        cache_salt=got.cache_salt,
        priority=got.priority,
        created_s=got.created_time,
        unsupported=_unsupported(fields, got),
        trace=got.trace,
    )


def rid_of(values: object, layouts: Layouts) -> str | None:
    """The request's id, if that much of a faulty request can be read."""
    if not isinstance(values, list):
        return None
    at = 1 + layouts.request.index("rid")
    rid = values[at] if len(values) > at else None
    return rid if isinstance(rid, str) else None


def _encode_sampling(params: SamplingParams, layouts: Layouts) -> list[object]:
    """Values as they are, floats in double precision; nil stands for the engine's default."""
    values: dict[str, object] = {
        "max_new_tokens": params.max_new_tokens,
        "stop_token_ids": params.stop_token_ids or None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "min_new_tokens": params.min_new_tokens,
        "json_schema": params.json_schema,
        "regex": params.regex,
        "ebnf": params.ebnf,
        "structural_tag": params.structural_tag,
        "ignore_eos": params.ignore_eos,
        "custom_params": _own_params(params),
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "seed": params.seed,
        "n": 1,
        "stop_strs": (),
        "stop_str_max_len": 0,
        "is_normalized": False,
    }
    return laid_out(values, layouts.sampling)


def _decode_sampling(got: SamplingStruct) -> SamplingParams:
    temperature, top_k = got.temperature, got.top_k
    if got.is_normalized and temperature == 1.0 and top_k == 1:
        # A normalising frontend writes greedy as "temperature 1, the likeliest token only".
        temperature, top_k = 0.0, None
    return SamplingParams(
        max_new_tokens=got.max_new_tokens,
        min_new_tokens=got.min_new_tokens,
        temperature=temperature,
        top_p=got.top_p,
        top_k=top_k,
        min_p=got.min_p,
        frequency_penalty=got.frequency_penalty,
        presence_penalty=got.presence_penalty,
        repetition_penalty=got.repetition_penalty,
        logit_bias=tuple((_token_id(token), bias) for token, bias in got.logit_bias.items()),
        seed=got.seed,
        stop_token_ids=tuple(got.stop_token_ids),
        ignore_eos=got.ignore_eos,
        json_schema=got.json_schema,
        regex=got.regex,
        ebnf=got.ebnf,
        structural_tag=got.structural_tag,
        **_read_own(got.custom_params),
    )


def _own_params(params: SamplingParams) -> dict[str, object] | None:
    """Fields for which these layouts have no place, in the one that is for anything."""
    own: dict[str, object] = {name: getattr(params, name) for name in _OWN if getattr(params, name)}
    return {_OWN_KEY: own} if own else None


def _read_own(custom: object) -> _Own:
    """Raises: WireError: our own part is not what `_own_params` writes."""
    if not isinstance(custom, dict) or _OWN_KEY not in custom:
        return _Own()
    try:
        own = msgspec.convert(custom[_OWN_KEY], OwnParams)
    except msgspec.ValidationError as no:
        raise WireError("sampling_params.custom_params", str(no)) from None
    return _Own(bad_words=own.bad_words, allowed_token_ids=own.allowed_token_ids, processors=own.processors)


def _token_id(key: str | int) -> int:
    try:
        return int(key)
    except ValueError:
        raise WireError("sampling_params.logit_bias", f"key {key!r:.40} is not a token id") from None


def _unsupported(fields: dict[str, Any], got: RequestStruct) -> tuple[str, ...]:
    """Names of fields that were set and that this build does not serve."""
    names = [name for name in _NOT_SERVED if fields.get(name)]
    sampling = fields["sampling_params"]
    names += [name for name in _SAMPLING_NOT_SERVED if sampling.get(name)]
    custom = got.sampling_params.custom_params
    if custom and not (isinstance(custom, dict) and custom.keys() == {_OWN_KEY}):
        names.append("custom_params")
    if got.sampling_params.n != 1:
        names.append("n")
    return (*names, *got.unsupported)
