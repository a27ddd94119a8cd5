"""The fields a request may have, with their types and bounds; the source of the OpenAPI document too."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from tokenspeed.frontend.limits import MAX_PRIORITY, MAX_SALT_BYTES, MAX_STOP_CHARS, MAX_STOP_STRINGS
from tokenspeed.plane.checks import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
)

MAX_REQUEST_ID_CHARS = 256

Penalty: TypeAlias = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Ratio: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TokenIds: TypeAlias = list[int]
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_BAD_WORDS = 256


FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
MAX_TOOLS = 256


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class FunctionSpec(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(msgspec.Struct, kw_only=True):
    name: FunctionName


class NamedTool(msgspec.Struct, kw_only=True):
    """One function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool


class GenerationFields(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common. null is the same as leaving a field out."""

    model: str | None = None
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Ratio | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=MAX_STOP_TOKEN_IDS)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    """Keep this many of the prompt's last tokens; -1: as many as fit; 0: all."""
    logit_bias: dict[str, float] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_BYTES)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] = []
    allowed_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None
    response_format: dict[str, object] | None = None
    structured_outputs: dict[str, object] | None = None
    json_schema: str | dict[str, object] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, object] | None = None
    guided_json: str | dict[str, object] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """`prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | TokenIds]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[dict[str, object]]
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    include_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, object] = {}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """One of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    tools: Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)] = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, object] = {}


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: TokenIds
    model: str | None = None


REFUSED = frozenset(
    {
        *("functions", "function_call", "modalities", "audio", "prediction"),
        *("web_search_options", "suffix", "best_of", "logits_processors"),
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        *("lora_path", "lora_name", "lora_request", "adapter", "kv_transfer_params", "bootstrap_host"),
        *("bootstrap_port", "bootstrap_room", "data_parallel_rank", "use_beam_search", "length_penalty"),
        *("early_stopping", "return_hidden_states", "documents", "mm_processor_kwargs", "prompt_embeds", "images"),
        *("input_embeds", "logprob_token_ids", "thinking_budget", "custom_params", "continue_final_message"),
        *("chat_template", "token_ids_logprob", "stop_regex", "conversation"),
    }
)
"""Known fields of this family of servers that this build does not serve: refused unless neutral, because an
answer without what they ask for would be a wrong one. Any other unknown field is ignored."""

NEUTRAL: tuple[object, ...] = (None, False, [], {}, "")
NEUTRAL_FOR: dict[str, tuple[object, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "data_parallel_rank": (-1,),
}
