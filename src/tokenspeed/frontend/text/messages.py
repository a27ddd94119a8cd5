"""Chat messages as a client sends them to messages as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenspeed.errors import RequestError

_LATER = MappingProxyType(
    {
        "image": "images are",
        "image_url": "images are",
        "input_image": "images are",
        "audio": "audio is",
        "audio_url": "audio is",
        "input_audio": "audio is",
        "video": "video is",
        "video_url": "video is",
        "file": "files are",
    }
)


def template_messages(messages: object) -> list[dict[str, object]]:
    """Copies of `messages` with content as plain text and tool arguments as objects.

    Content may be a text, or a list of parts ``{"type": "text", "text": …}``, which are joined by line
    ends. Other keys are passed on as they are.

    Raises: RequestError: 400; its text and field name the message and the part.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError(
            f"messages is {messages!r:.80}; a list with one message at least is needed", field="messages"
        )
    return [_message(one, f"messages[{place}]") for place, one in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r:.80}; an object with role and content is needed", field=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r:.80}; a text such as 'user' is needed", field=f"{where}.role")
    found = {str(key): value for key, value in message.items()}
    calls = found.get("tool_calls")
    if found.get("content") is None and role == "assistant":
        found["content"] = found.get("refusal")  # an answer of ours: calls, or reasoning that was cut off, and no text
    elif found.get("content") is None:
        raise RequestError(f"{where}.content is missing; a text is needed", field=f"{where}.content")
    found["content"] = _text(found["content"], f"{where}.content")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} is {content!r:.80}; a text or a list of text parts is needed", field=where)
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is {part!r:.80}; an object with a type is needed", field=where)
    kind = part.get("type")
    if kind in ("text", "refusal"):  # the latter in answers only
        text = part.get(kind)
        if not isinstance(text, str):
            raise RequestError(f"{where}.{kind} is {text!r:.80}; a text is needed", field=f"{where}.{kind}")
        return text
    if isinstance(kind, str) and kind in _LATER:
        raise RequestError(f"{where}.type is {kind!r}; {_LATER[kind]} not supported yet", field=f"{where}.type")
    raise RequestError(f"{where}.type is {kind!r:.80}; only 'text' is supported", field=f"{where}.type")


def _call(call: object) -> object:
    """Arguments of a tool call come as JSON text, and templates print them as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


_TOLD = """You may call functions. Those there are, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON within tags, one pair of tags a call:
<tool_call>
{{"name": "…", "arguments": {{…}}}}
</tool_call>"""


def with_tools_told(
    messages: list[dict[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """`messages` for a template that knows no tools: these, their calls and results are said in plain text."""
    told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    found = [_plain(message) for message in messages]
    if found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{told}"}, *found[1:]]
    return [{"role": "system", "content": told}, *found]


def _plain(message: dict[str, object]) -> dict[str, object]:
    """A call or a result as a message that every template can show."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    said = [str(message["content"])] if message["content"] else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        said.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(said)}
