"""Items of the responses API as chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from tokenspeed.frontend.http.errors import faulty
from tokenspeed.frontend.http.responses_schema import ResponseNamedTool, ResponsesRequest
from tokenspeed.frontend.http.schema import ChatRequest, FunctionSpec, NamedFunction, NamedTool, ToolSpec
from tokenspeed.plane.checks import fault

TEXT_PARTS = ("input_text", "output_text", "text")
Message = dict[str, object]


def chat_of(fields: ResponsesRequest, earlier: Sequence[Message], items: Sequence[Message]) -> ChatRequest:
    """The same request as a chat.

    Args:
        earlier: the messages of the response that this one follows.
        items: what `input_messages` made of this request's input.
    """
    told: list[Message] = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    choice = fields.tool_choice
    if isinstance(choice, ResponseNamedTool):
        named = NamedTool(type="function", function=NamedFunction(name=choice.name))
    effort = fields.reasoning.effort if fields.reasoning is not None else None
    return ChatRequest(
        messages=[*told, *earlier, *items],
        model=fields.model,
        max_tokens=fields.max_output_tokens,
        tools=[
            ToolSpec(
                type="function",
                function=FunctionSpec(name=tool.name, description=tool.description, parameters=tool.parameters),
            )
            for tool in fields.tools
        ],
        tool_choice=named if isinstance(choice, ResponseNamedTool) else choice,
        parallel_tool_calls=fields.parallel_tool_calls,
        response_format=_format(fields),
        reasoning_effort=effort,
        stream=fields.stream,
        truncate_prompt_tokens=-1 if fields.truncation == "auto" else None,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        repetition_penalty=fields.repetition_penalty,
        seed=fields.seed,
        ignore_eos=fields.ignore_eos,
        chat_template_kwargs=fields.chat_template_kwargs,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
    )


def _format(fields: ResponsesRequest) -> dict[str, object] | None:
    """A chat's response_format: what the format says of a schema stands one level deeper there."""
    given = fields.text.format if fields.text is not None else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def input_messages(given: str | Sequence[Mapping[str, object]]) -> list[Message]:
    """Chat messages of a request's input.

    Raises: RequestError: 400, an item that is no message, call or result.
    """
    if isinstance(given, str):
        if not given:
            raise faulty([fault("input", given, "a text that is not empty, or a list of items")])
        return [{"role": "user", "content": given}]
    if not given:
        raise faulty([fault("input", given, "at least one item")])
    messages: list[Message] = []
    for at, item in enumerate(given):
        _add(messages, item, f"input[{at}]")
    return messages


def _add(messages: list[Message], item: Mapping[str, object], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")})
        case "function_call":
            function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            last = messages[-1] if messages else {}
            calls = last.get("tool_calls")
            if last.get("role") == "assistant":
                last["tool_calls"] = [*(calls if isinstance(calls, list) else []), call]
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            output = item.get("output")
            text = _text(output, f"{where}.output") if isinstance(output, str | list) else json.dumps(output)
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})
        case "reasoning":
            pass
        case other:
            allowed = "message, function_call, function_call_output or reasoning"
            raise faulty([fault(f"{where}.type", other, allowed)])


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise faulty([fault(where, content, "a text or a list of text parts")])
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise faulty([fault(f"{where}[{at}]", part, f"a part with a text, of type {', '.join(TEXT_PARTS)}")])
        texts.append(text)
    return "\n".join(texts)


def _string(item: Mapping[str, object], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise faulty([fault(f"{where}.{name}", value, "a string")])
    return value


def said(output: Sequence[Message]) -> list[Message]:
    """Output items as messages of the conversation that goes on."""
    messages: list[Message] = []
    for at, item in enumerate(output):
        _add(messages, msgspec.to_builtins(item), f"output[{at}]")
    return messages
