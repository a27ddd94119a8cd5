"""langchain-openai against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain is only in the clients' environment")
pydantic = pytest.importorskip("pydantic")

HELLO = "hello world, 日本é the end"


@pytest.fixture(scope="module")
def chat(server_url: str) -> Any:
    return langchain_openai.ChatOpenAI(model="scripted", base_url=f"{server_url}/v1", api_key="x", max_retries=0)


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


def test_langchain_invokes_and_streams(chat: Any) -> None:
    assert chat.invoke("hello").content == HELLO
    assert chat.invoke("hello").usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("hello")) == HELLO
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert chat.invoke(parts).content == HELLO


def test_langchain_invokes_and_streams_asynchronously(chat: Any) -> None:
    async def run() -> str:
        assert (await chat.ainvoke("hello")).content == HELLO
        return "".join([chunk.content async for chunk in chat.astream("hello")])

    assert asyncio.run(run()) == HELLO


def test_langchain_binds_tools_and_reads_calls_streamed_or_not(chat: Any) -> None:
    tool = {"title": "get_weather", "description": "d", "type": "object", "properties": {"city": {"type": "string"}}}
    bound = chat.bind_tools([tool])
    (call,) = bound.invoke("weather").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    total = None
    for chunk in bound.stream("weather"):
        total = chunk if total is None else total + chunk
    assert [(one["name"], one["args"]) for one in total.tool_calls] == [("get_weather", {"city": "Paris"})]


def test_langchain_reads_a_structured_answer_through_a_forced_call(chat: Any) -> None:
    structured = chat.with_structured_output(
        {"title": "get_weather", "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        method="function_calling",
    )
    assert structured.invoke("anything") == {"city": "Paris"}
