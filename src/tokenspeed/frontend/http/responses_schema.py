"""POST /v1/responses: the fields of a request, the shape of an answer."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from tokenspeed.frontend.http.schema import (
    MAX_REQUEST_ID_CHARS,
    MAX_TOOLS,
    FunctionName,
    Penalty,
    Ratio,
    Tokens,
)
from tokenspeed.frontend.limits import MAX_PRIORITY, MAX_SALT_BYTES
from tokenspeed.plane.checks import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MAX_TOKENS

MAX_ID_CHARS = 128
Fields: TypeAlias = dict[str, object]  # a struct below has a field called object


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ResponseNamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: FunctionName


class ResponseText(msgspec.Struct, kw_only=True):
    """`format`: what the text must be; null: any text."""

    format: dict[str, object] | None = None
    verbosity: str | None = None


class ResponseReasoning(msgspec.Struct, kw_only=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`input` is a text, or a list of messages, calls and results of calls."""

    input: str | list[dict[str, object]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    max_output_tokens: Tokens | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: bool = True
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    stream: bool = False
    store: bool = True
    background: bool = False
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, object] | None = None
    user: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Ratio | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, object] = {}
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_BYTES)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)] | None = None


class InputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class ResponseReply(msgspec.Struct, kw_only=True):
    """`status` is queued, in_progress, completed, incomplete, cancelled or failed."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[Fields]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: ResponseReasoning
    store: bool
    temperature: float | None = None
    text: ResponseText
    tool_choice: str | ResponseNamedTool
    tools: list[ResponseTool]
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: Fields


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True
