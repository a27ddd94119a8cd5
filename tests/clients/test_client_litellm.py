"""litellm as a gateway sees the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="litellm is only in the clients' environment")

USER = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
HELLO = "hello world, 日本é the end"


@pytest.fixture
def options(server_url: str) -> dict[str, Any]:
    return {"model": "hosted_vllm/scripted", "api_base": f"{server_url}/v1", "api_key": "x", "num_retries": 0}


def test_litellm_completes_whole_and_streamed(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=USER, **options)
    assert whole.choices[0].message.content == HELLO
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=USER, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


def test_litellm_completes_asynchronously(options: dict[str, Any]) -> None:
    async def run() -> str:
        stream = await litellm.acompletion(messages=USER, stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(run()) == HELLO


def test_litellm_sees_calls_and_reasoning(options: dict[str, Any]) -> None:
    called = litellm.completion(messages=[{"role": "user", "content": "weather"}], tools=TOOLS, **options)
    (call,) = called.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert called.choices[0].finish_reason == "tool_calls"
    thought = litellm.completion(messages=[{"role": "user", "content": "think"}], **options)
    assert (thought.choices[0].message.reasoning_content, thought.choices[0].message.content) == ("Hm.", "Yes.")


def test_litellm_maps_our_errors_to_its_own(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=USER, temperature=-1, **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=USER, **{**options, "model": "hosted_vllm/other"})
