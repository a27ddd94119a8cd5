"""The official client, synchronous and not: chat, completions, structured answers, responses, calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")

HELLO = "hello world, 日本é the end"
USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="x", max_retries=0, timeout=20) as made:
        yield made


def test_the_helper_that_follows_a_stream_puts_a_call_together(client: Any) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    asked: Any = [{"role": "user", "content": "weather"}]
    with client.chat.completions.stream(model="scripted", messages=asked, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == {"city": "Paris"}


def test_the_asynchronous_client_streams_chat_completions_and_responses(server_url: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="x", max_retries=0) as client:
            chat = await client.chat.completions.create(model="scripted", messages=USER, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
            plain = await client.completions.create(model="scripted", prompt="hello", max_tokens=400, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in plain])
            async with client.responses.stream(model="scripted", input="hello") as events:
                response = await events.get_final_response()
            return [said, text, response.output_text]

    assert asyncio.run(run()) == [HELLO] * 3


def test_ids_go_in_and_come_out(client: Any) -> None:
    answer = client.completions.create(
        model="scripted", prompt=[[1, 2, 3], [4]], max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert [choice.to_dict()["prompt_token_ids"] for choice in answer.choices] == [[1, 2, 3], [4]]
    assert all(len(choice.to_dict()["token_ids"]) == 3 for choice in answer.choices)


def test_a_prompt_is_scored_without_generating(client: Any) -> None:
    answer = client.completions.create(model="scripted", prompt="hello", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.usage.completion_tokens == 0


def test_a_forced_call_is_answered_by_a_call(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(model="scripted", messages=USER, tools=[tool], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
