"""The messages API: content blocks, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from frontend_rig import LiveServer, live_server
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info

from tokenspeed.frontend.text.output.families import OutputFamily
from tokenspeed.frontend.text.output.reasoning import REASONING
from tokenspeed.plane.messages import GenerateRequest
from tokenspeed.settings.model import ServerSettings

TOKENIZER = piece_tokenizer()
ANSWERS = {
    "call": 'Well:\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "think": "<think>Hm.</think>Yes.",
}
TOOLS = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]


def script(request: GenerateRequest) -> Sequence[int]:
    prompt = TOKENIZER.decode(request.input_ids.tolist())
    asked = prompt.rpartition("<|user|>")[2].partition("\n")[0]
    return [*TOKENIZER.encode(ANSWERS.get(asked, "Yes.")), EOS]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    engine = ScriptedEngine(script=script, info=engine_info(max_model_len=2048), cached=4)
    family = OutputFamily(calls="hermes", reasoning=REASONING["think"])
    with live_server(engine, family=family, settings=ServerSettings(port=0, api_key="k")) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20, headers={"x-api-key": "k"}) as client:
        yield client


def ask(text: object, **fields: object) -> dict[str, object]:
    return {"model": "scripted", "max_tokens": 400, "messages": [{"role": "user", "content": text}], **fields}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    found = []
    for told in answer.text.strip().split("\n\n"):
        name, data = told.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make."""
    message = dict(events[0]["message"])
    blocks: list[dict[str, Any]] = []
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for name in ("text", "thinking"):
                    block[name] = block[name] + delta[name] if name in delta else block.get(name)
                if "partial_json" in delta:
                    block["json"] = block.get("json", "") + delta["partial_json"]
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json"))
    message["content"] = [{k: v for k, v in block.items() if v is not None} for block in blocks]
    return message


TEXT = {"type": "text", "text": "Yes."}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}


@pytest.mark.parametrize(
    ("fields", "content", "reason"),
    [
        (ask("hello"), [TEXT], "end_turn"),
        (ask("think", thinking={"type": "enabled", "budget_tokens": 99}), [THOUGHT, TEXT], "end_turn"),
        (ask("think"), [TEXT], "end_turn"),
        (ask("call", tools=TOOLS), [{"type": "text", "text": "Well:"}, {"type": "tool_use"}], "tool_use"),
        (ask("hello", max_tokens=1), [{"type": "text", "text": "Y"}], "max_tokens"),
        (ask("hello", stop_sequences=["s"]), [{"type": "text", "text": "Ye"}], "stop_sequence"),
    ],
)
def test_a_message_and_its_stream_say_the_same(
    http: httpx.Client, fields: dict[str, Any], content: list[dict[str, str]], reason: str
) -> None:
    whole = http.post("/v1/messages", json=fields).json()
    events = events_of(http.post("/v1/messages", json={**fields, "stream": True}))
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    streamed = put_together(events)
    for message in (whole, streamed):
        message.pop("id")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
                assert (block.pop("name"), block.pop("input")) == ("f", {"a": 1})
        assert message["content"] == content
        assert (message["stop_reason"], message["role"], message["type"]) == (reason, "assistant", "message")
        assert message["stop_sequence"] == ("s" if reason == "stop_sequence" else None)
    assert whole == streamed
    assert whole["usage"]["cache_read_input_tokens"] > 0
    total = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    counted = {name: value for name, value in fields.items() if name not in ("max_tokens", "stop_sequences")}
    assert http.post("/v1/messages/count_tokens", json=counted).json() == {"input_tokens": total}


def test_blocks_of_every_kind_reach_the_prompt(http: httpx.Client, live: LiveServer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Well:"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    fields = {"max_tokens": 5, "messages": messages, "tools": TOOLS, "system": [{"type": "text", "text": "Be brief."}]}
    assert http.post("/v1/messages", json=fields).status_code == 200
    prompt = TOKENIZER.decode(live.engine.requests[-1].input_ids.tolist())
    assert prompt.startswith("<|system|>Be brief.\n\nYou may call functions")
    told = prompt.partition("</tool_call>\n")[2]
    assert told == (
        "<|user|>a\nb\n"
        '<|assistant|>Well:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        "<|user|><tool_response>\nsunny\n</tool_response>\n<|user|>and?\n<|assistant|>"
    ) or told.endswith("<|user|><tool_response>\nsunny\n</tool_response>\n<|user|>and?\n<|assistant|>")


@pytest.mark.parametrize(
    ("choice", "held"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "f"}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
def test_a_choice_of_tools_is_that_of_a_chat(
    http: httpx.Client, live: LiveServer, choice: dict[str, str], *, held: bool
) -> None:
    assert http.post("/v1/messages", json=ask("call", tools=TOOLS, tool_choice=choice)).status_code == 200
    assert (live.engine.requests[-1].sampling.structural_tag is not None) is held


BAD: list[tuple[dict[str, object], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"system": 3}, "system"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [{"name": "two words"}]}, "tools[0].name"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[str(row[0])[:40] for row in BAD])
def test_a_bad_message_is_refused_before_anything_runs(
    http: httpx.Client, live: LiveServer, fields: dict[str, object], param: str
) -> None:
    before = len(live.engine.requests)
    for stream in ({}, {"stream": True}):
        answer = http.post("/v1/messages", json={**ask("x"), **stream, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    assert len(live.engine.requests) == before
