"""Messages made of content blocks as a chat: text, calls, results and reasoning where a chat has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenspeed.frontend.http.errors import faulty
from tokenspeed.frontend.http.messages_schema import CountTokensRequest, MessagesRequest
from tokenspeed.frontend.http.schema import ChatRequest, FunctionSpec, NamedFunction, NamedTool, ToolChoice, ToolSpec
from tokenspeed.plane.checks import fault

BLOCKS = "a text, or a list of blocks of type text, tool_use, tool_result or thinking"


def chat_of(fields: CountTokensRequest) -> ChatRequest:
    """The same request as a chat.

    Raises: RequestError: 400, a block of another kind, or one that is no block.
    """
    messages: list[dict[str, object]] = []
    if fields.system:
        messages.append({"role": "system", "content": plain_text(fields.system, "system")})
    for at, message in enumerate(fields.messages):
        messages += _chat_messages(message, f"messages[{at}]")
    chat = ChatRequest(messages=messages, model=fields.model)
    chat.tools = [
        ToolSpec(
            type="function",
            function=FunctionSpec(name=tool.name, description=tool.description, parameters=tool.input_schema),
        )
        for tool in fields.tools
    ]
    choice = fields.tool_choice
    if choice is not None:
        chat.tool_choice = _choice(choice.type, choice.name)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    thinks = fields.thinking is not None and fields.thinking.type != "disabled"
    chat.include_reasoning = thinks
    if fields.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": thinks}
    if isinstance(fields, MessagesRequest):
        chat.max_tokens, chat.seed, chat.stream = fields.max_tokens, fields.seed, fields.stream
        chat.temperature, chat.top_p, chat.top_k = fields.temperature, fields.top_p, fields.top_k
        chat.stop = list(fields.stop_sequences) or None
    return chat


def _choice(kind: str, name: str | None) -> ToolChoice:
    if kind == "tool":
        if name is None:
            raise faulty([fault("tool_choice.name", name, "the name of one of the tools")])
        return NamedTool(type="function", function=NamedFunction(name=name))
    return "required" if kind == "any" else "none" if kind == "none" else "auto"


def plain_text(content: object, where: str) -> str:
    """The text of a content that may hold nothing else."""
    if isinstance(content, str):
        return content
    texts = []
    for at, block in enumerate(_blocks(content, where)):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise faulty([fault(f"{where}[{at}]", block, "a block of type text")])
        texts.append(str(block["text"]))
    return "\n".join(texts)


def _blocks(content: object, where: str) -> Sequence[Mapping[str, object]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise faulty([fault(where, content, BLOCKS)])
    return content


def _chat_messages(message: Mapping[str, object], where: str) -> list[dict[str, object]]:
    """One message; results of calls become messages of their own, before it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise faulty([fault(f"{where}.role", role, "user or assistant")])
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    calls: list[dict[str, object]] = []
    results: list[dict[str, object]] = []
    thoughts: list[str] = []
    for at, block in enumerate(_blocks(content, f"{where}.content")):
        place = f"{where}.content[{at}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", place))
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": _string(block, "name", place), "arguments": arguments}
                calls.append({"id": _string(block, "id", place), "type": "function", "function": function})
            case "tool_result":
                text = plain_text(block.get("content") or "", f"{place}.content")
                results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", place), "content": text})
            case other:
                raise faulty([fault(f"{place}.type", other, BLOCKS)])
    found: dict[str, object] = {"role": role, "content": "\n".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    return [*results, *([found] if texts or calls or not results else [])]


def _string(block: Mapping[str, object], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise faulty([fault(f"{where}.{name}", value, "a string")])
    return value
