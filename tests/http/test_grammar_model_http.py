"""Constrained answers of the real small model over HTTP: what clients get is what their grammar says.

All requests are sent at once, so that batches mix different grammars with plain requests, greedy with sampled
rows and streams with whole answers; each test looks at one of the answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import httpx
import jsonschema
import pytest
from ops_server import ops_server

from tokenspeed.settings.model import DeviceSettings, ModelSettings, SchedulerSettings, Settings

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["glad", "sad", None]},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "home": {"anyOf": [{"$ref": "#/$defs/town"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "mood", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"town": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{3}$"}}}},
}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "km": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "km"],
    "additionalProperties": False,
}
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 50}
TOOLS = [
    {"type": "function", "function": {"name": "travel", "description": "Go there.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stay", "parameters": {"type": "object", "properties": {}}}},
]
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "at_least_one": True,
        "stop_after_first": True,
        "tags": [
            {
                "begin": '<tool_call>\n{"name": "travel", "arguments": ',
                "content": {"type": "json_schema", "json_schema": PLACE},
                "end": "}\n</tool_call>",
            }
        ],
    },
}
EBNF = 'root ::= "fn " name "(" [0-9]{1,3} ")"\nname ::= "sin" | "cos" | "ta" "n"'
CHOICES = ["yes", "no", "só-só\n"]


@attrs.frozen(kw_only=True)
class Answer:
    """One choice, however it came: whole or as a stream."""

    text: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str


def valid(schema: object) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), schema)

    return check


def matches(pattern: str, *, reason: str = "stop") -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        assert re.fullmatch(pattern, answer.text), answer.text
        assert answer.finish_reason == reason

    return check


def an_object(answer: Answer) -> None:
    """Nothing bounds it, so the limit may cut it."""
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert answer.text.startswith("{")
        with pytest.raises(json.JSONDecodeError):
            json.loads(answer.text)


def calls_travel(answer: Answer) -> None:
    assert answer.finish_reason == "tool_calls"
    ((name, arguments),) = answer.calls
    assert name == "travel"
    jsonschema.validate(json.loads(arguments), PLACE)


def calls_something(answer: Answer) -> None:
    assert answer.finish_reason == "tool_calls"
    ((name, arguments),) = answer.calls
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    jsonschema.validate(json.loads(arguments), schemas[name])


def chat(text: str, **fields: object) -> tuple[str, dict[str, object]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 96, **fields}


def prompt(text: str, **fields: object) -> tuple[str, dict[str, object]]:
    return "/v1/completions", {"prompt": text, "max_tokens": 96, **fields}


def schema_of(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


def asked(**structured: object) -> dict[str, object]:
    return {"structured_outputs": structured}


CASES: dict[str, tuple[tuple[str, dict[str, object]], Callable[[Answer], None]]] = {
    "json_schema": (chat("Describe Ada as JSON.", **schema_of(PERSON)), valid(PERSON)),
    "json_schema of a completion": (prompt("Ada, as JSON: ", **asked(json=PERSON)), valid(PERSON)),
    "json_object": (chat("Reply with {}.", response_format={"type": "json_object"}, max_tokens=24), an_object),
    "regex": (
        prompt("Phone: ", **asked(regex=r"(\+[1-9]{1,2} )?\d{3}-\d{4}")),
        matches(r"(\+[1-9]{1,2} )?\d{3}-\d{4}"),
    ),
    "choice": (chat("Is it cold?", **asked(choice=CHOICES)), matches("|".join(map(re.escape, CHOICES)))),
    "ebnf": (prompt("f(x) = ", **asked(grammar=EBNF)), matches(r"fn (sin|cos|tan)\([0-9]{1,3}\)")),
    "tools": (chat("Go to Rome.", tools=TOOLS, tool_choice="required", parallel_tool_calls=False), calls_something),
    "a named tool": (
        chat("Go.", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "travel"}}),
        calls_travel,
    ),
    "a structural tag and tools": (chat("Go to Rome.", tools=TOOLS, response_format=TAG), calls_travel),
    "a cut regex": (prompt("abc", max_tokens=5, **asked(regex="[a-z ]{20}")), matches("[a-z ]+", reason="length")),
    "a cut schema": (
        chat("Count.", **schema_of(DIGITS), max_tokens=7),
        matches(r"\[\s{0,2}([0-9]\s{0,2}(,\s{0,2})?)*", reason="length"),
    ),
}
PLAIN = prompt("The capital of France is", max_tokens=24, temperature=0, ignore_eos=True)
WAYS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "seed": 7},
}
SHAPES = [(name, way, stream) for name in CASES for way, stream in (("greedy", False), ("sampled", True))]
"""Each grammar both ways; a few are asked for the other way round below."""
SHAPES += [(name, way, stream) for name in ("regex", "tools") for way, stream in (("greedy", True), ("sampled", False))]


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> Answer:
    if not body.get("stream"):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return read(answer.json()["choices"], "message")
    async with http.stream("POST", path, json=body) as stream:
        lines = [line.removeprefix("data: ") async for line in stream.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return read([choice for line in lines[:-1] for choice in json.loads(line)["choices"]], "delta")


def read(choices: list[dict[str, Any]], holder: str) -> Answer:
    """Of a whole answer's one choice, or of a stream's pieces."""
    text, calls = "", dict[int, tuple[str, str]]()
    for choice in choices:
        said = choice.get(holder, choice)
        text += said.get("content") or said.get("text") or ""
        for at, call in enumerate(said.get("tool_calls") or ()):
            name, arguments = calls.get(call.get("index", at), ("", ""))
            function = call["function"]
            calls[call.get("index", at)] = (name + (function.get("name") or ""), arguments + function["arguments"])
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    (reason,) = reasons
    return Answer(text=text, calls=tuple(calls.values()), finish_reason=reason)


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[object, Answer]]:
    settings = Settings(
        model=ModelSettings(max_len_tokens=512),
        device=DeviceSettings(threads=1, kv_pool_tokens=8192),
        scheduler=SchedulerSettings(max_num_seqs=16, max_waiting=64),
    )

    async def all_at_once(url: str) -> dict[object, Answer]:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64)) as http:
            found: dict[object, Answer] = {"alone": await ask(http, *PLAIN)}
            jobs = {("beside", at): ask(http, *PLAIN) for at in range(2)}
            for name, way, stream in SHAPES:
                (path, body), _ = CASES[name]
                jobs[name, way, stream] = ask(http, path, {**body, **WAYS[way], "stream": stream})
            found.update(zip(jobs, await asyncio.gather(*jobs.values()), strict=True))
            found["again"] = await ask(http, *CASES["regex"][0][:1], {**CASES["regex"][0][1], **WAYS["sampled"]})
            return found

    with ops_server(settings) as server:
        yield asyncio.run(all_at_once(server.url))


@pytest.mark.model
@pytest.mark.contract("GR-10")
@pytest.mark.parametrize(("name", "way", "stream"), SHAPES, ids=[f"{n}, {w}{', streamed' * s}" for n, w, s in SHAPES])
def test_an_answer_is_what_its_grammar_says(
    answers: dict[object, Answer], name: str, way: str, *, stream: bool
) -> None:
    CASES[name][1](answers[name, way, stream])


@pytest.mark.model
def test_a_plain_request_gets_the_same_text_alone_and_among_grammars(answers: dict[object, Answer]) -> None:
    assert answers["beside", 0] == answers["beside", 1] == answers["alone"]
    assert answers["alone"].finish_reason == "length"


@pytest.mark.model
def test_a_seeded_constrained_answer_is_the_same_streamed_whole_and_alone(answers: dict[object, Answer]) -> None:
    assert answers["regex", "sampled", True] == answers["regex", "sampled", False] == answers["again"]
    assert answers["regex", "greedy", True] == answers["regex", "greedy", False]
    assert answers["tools", "greedy", True] == answers["tools", "greedy", False]
