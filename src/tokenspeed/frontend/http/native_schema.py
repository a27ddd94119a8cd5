"""The fields of POST /generate, in SGLang's words."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tokenspeed.frontend.http.schema import MAX_REQUEST_ID_CHARS, Penalty, Ratio, StopText, TokenIds
from tokenspeed.frontend.limits import MAX_PRIORITY, MAX_SALT_BYTES, MAX_STOP_STRINGS
from tokenspeed.plane.checks import MAX_REPETITION_PENALTY, MAX_STOP_TOKEN_IDS, MAX_TEMPERATURE, MAX_TOKENS

Name = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]


class NativeSampling(msgspec.Struct, kw_only=True):
    """`sampling_params`; null is the same as leaving a field out.

    `max_new_tokens`: 0 for the prompt's log-probabilities alone.
    """

    max_new_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 128
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Ratio | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    sampling_seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=MAX_STOP_TOKEN_IDS)] = []
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class GenerateFields(msgspec.Struct, kw_only=True):
    """One of `text` and `input_ids`, each one prompt or a list of them; so are `sampling_params` and `rid`.

    `logprob_start_len`: the first prompt position whose log-probability is returned; -1: none.
    """

    text: str | list[str] | None = None
    input_ids: list[int | TokenIds] | None = None
    sampling_params: dict[str, object] | list[dict[str, object]] | None = None
    rid: Name | list[Name] | None = None
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = -1
    top_logprobs_num: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    return_text_in_logprobs: bool = True
    stream: bool = False
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_BYTES)] | None = None


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`type`: stop, with what `matched`; length, with the `length`; abort, with a `message`."""

    type: str
    matched: str | int | None = None
    length: int | None = None
    message: str | None = None


Triple = tuple[float | None, int, str | None]
"""Log-probability, token id, the token's text."""


class MetaInfo(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    input_token_logprobs: list[Triple] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[Triple] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Triple] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Triple]] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, kw_only=True):
    """One sequence; in a stream, all of it so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET
