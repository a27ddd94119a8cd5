"""Tool calls and reasoning over HTTP, streamed and whole, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from frontend_rig import LiveServer, live_server
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import ScriptedEngine

from tokenspeed.frontend.text.output.families import FORMATS, OutputFamily
from tokenspeed.frontend.text.output.reasoning import REASONING
from tokenspeed.plane.messages import GenerateRequest
from tokenspeed.settings.model import ReasoningParser, ToolParser

TOKENIZER = piece_tokenizer()
ANSWERS = {
    "call": 'Well:\n<tool_call>\n{"name": "f", "arguments": {"a": "é日本", "b": [1]}}\n</tool_call>',
    "twice": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
    "think": "<think>\nHm.\n</think>\n\nYes.",
    "thinkcall": '<think>Hm.</think><tool_call>{"name": "g", "arguments": {}}</tool_call>',
    "plain": "Yes.",
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
NAMED: Any = {"type": "function", "function": {"name": "g"}}


def script(request: GenerateRequest) -> Sequence[int]:
    """What the last user message names."""
    prompt = TOKENIZER.decode(request.input_ids.tolist())
    asked = prompt.rpartition("<|user|>")[2].partition("\n")[0]
    return [*TOKENIZER.encode(ANSWERS.get(asked, "Yes.")), EOS]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    from scripted_engine import engine_info

    engine = ScriptedEngine(script=script, info=engine_info(max_model_len=2048))
    with live_server(engine, family=OutputFamily(calls="hermes", reasoning=REASONING["think"])) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=20) as made:
        yield made


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def whole_and_streamed(client: openai.OpenAI, **options: Any) -> tuple[Any, Any]:
    """The message of a call, and the same put together from its stream: role, content, reasoning, calls, finish."""
    whole = client.chat.completions.create(model="scripted", **options)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    message = whole.choices[0].message
    told = (
        message.content or "",
        getattr(message, "reasoning_content", ""),
        [(call.function.name, call.function.arguments) for call in message.tool_calls or []],
        whole.choices[0].finish_reason,
    )
    content, reasoning, calls, finish = "", "", list[list[str]](), None
    for chunk in client.chat.completions.create(model="scripted", stream=True, **options):
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                assert call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return told, (content, reasoning, [tuple(call) for call in calls], finish)


@pytest.mark.parametrize(
    ("asked", "content", "reasoning", "calls", "finish"),
    [
        ("call", "Well:", "", [("f", '{"a": "é日本", "b": [1]}')], "tool_calls"),
        ("twice", "", "", [("f", '{"a": 1}'), ("g", "{}")], "tool_calls"),
        ("think", "Yes.", "Hm.", [], "stop"),
        ("thinkcall", "", "Hm.", [("g", "{}")], "tool_calls"),
        ("plain", "Yes.", "", [], "stop"),
    ],
)
def test_calls_and_reasoning_are_told_apart_streamed_or_not(
    client: openai.OpenAI, asked: str, content: str, reasoning: str, calls: list[tuple[str, str]], finish: str
) -> None:
    whole, streamed = whole_and_streamed(client, messages=ask(asked), tools=TOOLS)
    assert whole == streamed == (content, reasoning, calls, finish)


def test_one_call_where_parallel_calls_are_switched_off(client: openai.OpenAI) -> None:
    whole, streamed = whole_and_streamed(client, messages=ask("twice"), tools=TOOLS, parallel_tool_calls=False)
    assert whole == streamed == ("", "", [("f", '{"a": 1}')], "tool_calls")


def test_what_looks_like_a_call_is_text_without_tools_or_with_choice_none(client: openai.OpenAI) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        whole, streamed = whole_and_streamed(client, messages=ask("call"), **options)
        assert whole == streamed == (ANSWERS["call"], "", [], "stop")


def test_reasoning_can_be_left_out(client: openai.OpenAI) -> None:
    whole, streamed = whole_and_streamed(client, messages=ask("think"), extra_body={"include_reasoning": False})
    assert whole == streamed == ("Yes.", "", [], "stop")


def test_a_call_cut_by_the_token_limit_ends_with_length(client: openai.OpenAI) -> None:
    limit = len(TOKENIZER.encode(ANSWERS["twice"][:45]))
    whole, streamed = whole_and_streamed(client, messages=ask("twice"), tools=TOOLS, max_tokens=limit)
    assert whole == streamed
    assert whole[3] == "length"
    assert whole[2][0][0] == "f"


def test_tools_calls_and_results_reach_the_prompt(client: openai.OpenAI, live: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: Any = [
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    prompt = TOKENIZER.decode(live.engine.requests[-1].input_ids.tolist())
    assert prompt.startswith("<|system|>You may call functions")  # this template has no place for tools
    assert '"name": "f", "description": "d"' in prompt
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert "sunny" in prompt


@pytest.mark.parametrize(("choice", "names"), [("required", ["f", "g"]), (NAMED, ["g"])], ids=["required", "named"])
def test_a_call_that_must_be_made_is_asked_of_the_engine_as_a_grammar(
    client: openai.OpenAI, live: LiveServer, choice: Any, names: list[str]
) -> None:
    client.chat.completions.create(model="scripted", messages=ask("call"), tools=TOOLS, tool_choice=choice)
    tag = json.loads(live.engine.requests[-1].sampling.structural_tag or "")
    assert [json.loads(one["begin"].partition(": ")[2].partition(",")[0]) for one in tag["format"]["tags"]] == names
    client.chat.completions.create(model="scripted", messages=ask("call"), tools=TOOLS, tool_choice="auto")
    assert live.engine.requests[-1].sampling.structural_tag is None


def test_each_choice_has_calls_of_its_own(live: LiveServer) -> None:
    body = {"messages": ask("twice"), "tools": TOOLS, "n": 3}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=20).json()
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(ids) == len(set(ids)) == 6
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}


def test_every_parser_of_the_settings_exists() -> None:
    assert {one.value for one in ToolParser} == {"auto", "none", *FORMATS}
    assert {one.value for one in ReasoningParser} == {"auto", "none", *REASONING}
