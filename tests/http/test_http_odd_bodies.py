"""Bodies that are right but for one odd value, anywhere in them: an answer or a 400, on every route, and no trace."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from frontend_rig import LiveServer, live_server
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info, says

from tokenspeed.frontend.text.output.families import OutputFamily
from tokenspeed.frontend.text.output.reasoning import REASONING

TOKENIZER = piece_tokenizer()
SAID = '<think>Hm.</think>Well:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHARED: dict[str, Any] = {
    "model": "scripted",
    "n": 2,
    "seed": 1,
    "stop": ["zz"],
    "logit_bias": {"5": 1},
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "request_id": "mine",
    "bad_words": ["no"],
    "stop_token_ids": [5],
    "return_token_ids": True,
}
CHAT: dict[str, Any] = {
    **SHARED,
    "messages": [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "chat_template_kwargs": {"enable_thinking": True},
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 9,
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {**SHARED, "prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 3},
        {"prompt": [[1, 2], [3]], "structured_outputs": {"json": SCHEMA}, "max_tokens": 3},
    ],
    "/v1/chat/completions": [
        CHAT,
        {"messages": CHAT["messages"], "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ],
    "/v1/responses": [
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "summary": []},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
            "max_output_tokens": 9,
        },
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ],
    "/v1/messages": [
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "b"}]}
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "stop_sequences": ["zz"],
        }
    ],
    "/generate": [
        {
            "text": ["a", "b"],
            "sampling_params": [{"n": 2, "logit_bias": {"5": 1}, "stop": ["zz"], "max_new_tokens": 3}, {}],
            "rid": ["x", "y"],
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
        },
        {"input_ids": [[1, 2], [3]], "sampling_params": {"stop_token_ids": [5], "json_schema": json.dumps(SCHEMA)}},
    ],
    "/tokenize": [{"messages": CHAT["messages"], "tools": CHAT["tools"], "return_token_strs": True}],
}
BODIES["/v1/messages/count_tokens"] = [
    {name: value for name, value in BODIES["/v1/messages"][0].items() if name not in ("max_tokens", "stop_sequences")}
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 5, 1.5, 1e300, -0.0, 2**31, 2**63, 2**64, 10**40),
    *("", "x", "\x00", "\u2028", "{", "null", "\U0001f600", "é" * 300, "٣", "03", "+3", " 3"),
    *([], [None], [[]], [{}], ["x"], [5], [1.5], [[["x"]]], ["x"] * 300),
    *({}, {"": 1}, {"type": "text"}, {"type": 5}, {"$ref": "#"}, {"a": {"b": [None]}}, {"03": 1, "3": 2}),
]
REMOVED = object()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for step in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[step], (*at, step))


def with_odd_value(body: dict[str, Any], source: random.Random) -> dict[str, Any]:
    made: Any = copy.deepcopy(body)
    *way, last = source.choice([place for place in places(made) if place])
    holder = made
    for step in way:
        holder = holder[step]
    odd = source.choice([*ODD, REMOVED])
    if odd is REMOVED:
        del holder[last]
    else:
        holder[last] = odd
    if isinstance(holder, dict) and source.random() < 0.2:
        holder["new"] = source.choice(ODD)
    return dict(made)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    engine = ScriptedEngine(script=says([*TOKENIZER.encode(SAID), EOS]), info=engine_info(max_model_len=2048))
    with live_server(engine, family=OutputFamily(calls="hermes", reasoning=REASONING["think"])) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_a_body_with_one_odd_value_is_answered_or_refused_and_leaves_nothing(
    http: httpx.Client, live: LiveServer, path: str
) -> None:
    source = random.Random(path)
    statuses = set()
    for body in BODIES[path]:
        whole = http.post(path, json=body)
        assert whole.status_code == 200, whole.text
        for _ in range(30):
            odd = with_odd_value(body, source)
            odd.setdefault("stream", source.random() < 0.5)
            answer = http.post(path, json=odd)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (odd, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["message"]
                assert len(answer.content) < 10_000
            else:
                assert '"error":{' not in answer.text, odd
    assert statuses >= {200, 400}
    assert live.engine.wait_until(lambda: live.engine.quiet)
    assert live.in_flight() == live.on_loop(lambda: live.rig.api.state.busy) == 0


@pytest.mark.parametrize("key", ["٣", "03", "+3", " 3", "3 ", "0x3", "3_0", "-0"])
def test_a_key_of_logit_bias_is_a_token_id_in_its_usual_form(http: httpx.Client, key: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "logit_bias": {key: 1, "3": 2}})
    assert (answer.status_code, answer.json().get("error", {}).get("param")) == (400, "logit_bias key")
