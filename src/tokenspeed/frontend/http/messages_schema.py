"""POST /v1/messages and its relatives: the fields of a request, the shape of an answer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tokenspeed.frontend.http.schema import MAX_REQUEST_ID_CHARS, MAX_TOOLS, FunctionName, StopText, Tokens
from tokenspeed.frontend.limits import MAX_STOP_STRINGS
from tokenspeed.plane.checks import MAX_TEMPERATURE, MAX_TOKENS


class MessageTool(msgspec.Struct, kw_only=True):
    """A function the model may call; `input_schema` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    input_schema: dict[str, object] | None = None
    type: Literal["custom"] | None = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, kw_only=True):
    """`budget_tokens` is accepted and not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    messages: list[dict[str, object]]
    model: str | None = None
    system: str | list[dict[str, object]] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Tokens
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] = []
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    seed: int | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)] | None = None


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were not found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageReply(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, object]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountedTokens(msgspec.Struct, kw_only=True):
    input_tokens: int
