"""Every field of every generating route: it does what it says, and another type of value is a 400 that names it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import httpx
import pytest
from frontend_rig import LiveServer, live_server
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info, says

from tokenspeed.plane.messages import GenerateRequest

Json = dict[str, Any]
Show = Callable[[list[GenerateRequest], Json], object]
"""What a field did, to be seen in what the engine got or in the answer."""

TOKENIZER = piece_tokenizer()
TEXT = "hello world, 日本é the end"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{{ reasoning_effort }}{{ mood }}{{ enable_thinking }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

INT = ("5", 1.5, True, {})
NUMBER = ("0.5", True, [1])
BOOL = ("true", 1, {})
STRING = (5, ["x"])
IDS = (5, ["a"], [1.5], [None])
OBJECT = ("x", [1], True)
WORDS = (5, "x", [5], {})


@attrs.frozen
class Field:
    """
    Attributes:
        good: a value that is allowed.
        shows: what is to be seen of it.
        does: where it is to be seen, and how.
        wrong: values of other types.
        beside: fields that it needs.
    """

    good: object
    shows: object
    does: Show
    wrong: tuple[object, ...]
    beside: Json = attrs.field(factory=dict)


def sampling(name: str) -> Show:
    return lambda requests, _: getattr(requests[0].sampling, name)


def request(name: str) -> Show:
    return lambda requests, _: getattr(requests[0], name)


def prompt(requests: list[GenerateRequest], _: Json) -> str:
    return TOKENIZER.decode(requests[0].input_ids.tolist())


def count(requests: list[GenerateRequest], _: Json) -> int:
    return len(requests)


def choice(name: str) -> Show:
    return lambda _, answer: answer["choices"][0][name]


def answered(*path: Any) -> Show:
    def show(_: list[GenerateRequest], answer: Json) -> object:
        found: Any = answer
        for step in path:
            found = found[step]
        return found

    return show


def said(_: list[GenerateRequest], answer: Json) -> str:
    if "choices" in answer:
        first = answer["choices"][0]
        return str(first["text"] if "text" in first else first["message"]["content"])
    if isinstance(answer.get("text"), str):
        return str(answer["text"])
    return str((answer.get("content") or answer["output"][0]["content"])[0]["text"])


def grammar(name: str) -> Show:
    return lambda requests, _: json.loads(getattr(requests[0].sampling, name))


SAMPLED: dict[str, Field] = {
    "temperature": Field(0.5, 0.5, sampling("temperature"), NUMBER),
    "top_p": Field(0.5, 0.5, sampling("top_p"), NUMBER),
    "top_k": Field(5, 5, sampling("top_k"), INT),
    "min_p": Field(0.1, 0.1, sampling("min_p"), NUMBER),
    "frequency_penalty": Field(-0.5, -0.5, sampling("frequency_penalty"), NUMBER),
    "presence_penalty": Field(1, 1, sampling("presence_penalty"), NUMBER),
    "repetition_penalty": Field(1.5, 1.5, sampling("repetition_penalty"), NUMBER),
    "seed": Field(3, 3, sampling("seed"), INT),
    "ignore_eos": Field(True, True, sampling("ignore_eos"), BOOL),
}
ROUTED: dict[str, Field] = {
    "priority": Field(-3, -3, request("priority"), INT),
    "cache_salt": Field("me", b"me", request("cache_salt"), STRING),
}
STOPPED: dict[str, Field] = {
    "stop": Field(["zz", "ld,"], "hello wor", said, (5, True, {}, [5], [None])),
    "stop_token_ids": Field([ord(",")], "hello world", said, IDS),
    "logit_bias": Field({"5": 1.5}, ((5, 1.5),), sampling("logit_bias"), ("x", 5, [1], {"5": "x"}, {"5": True})),
    "n": Field(2, 2, count, INT),
    "skip_special_tokens": Field(
        False, True, lambda _, answer: "<|eos|>" in said([], answer), BOOL, {"ignore_eos": True}
    ),
}
SHARED: dict[str, Field] = {
    **SAMPLED,
    **ROUTED,
    **STOPPED,
    "model": Field("scripted", "scripted", answered("model"), STRING),
    "max_tokens": Field(2, "hello wor", said, INT),
    "min_tokens": Field(5, 5, sampling("min_new_tokens"), INT),
    "include_stop_str_in_output": Field(True, "hello world", said, BOOL, {"stop": "ld"}),
    "spaces_between_special_tokens": Field(False, TEXT, said, BOOL),
    "truncate_prompt_tokens": Field(
        2, 2, lambda requests, _: len(requests[0].input_ids), INT, {"prompt": "hello world"}
    ),
    "stream": Field(False, TEXT, said, BOOL),
    "stream_options": Field({"include_usage": True}, TEXT, said, OBJECT),
    "return_token_ids": Field(True, [*TOKENIZER.encode(TEXT), EOS], choice("token_ids"), BOOL),
    "prompt_logprobs": Field(2, (0, 2), lambda got, _: (got[0].prompt_logprobs, got[0].top_logprobs), INT),
    "request_id": Field("mine", None, lambda _, __: None, STRING),
    "bad_words": Field(["no"], True, lambda got, _: bool(got[0].sampling.bad_words), WORDS),
    "allowed_token_ids": Field([5, 6], (5, 6), sampling("allowed_token_ids"), IDS),
    "response_format": Field(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, SCHEMA, grammar("json_schema"), OBJECT
    ),
    "structured_outputs": Field({"json": SCHEMA}, SCHEMA, grammar("json_schema"), OBJECT),
    "json_schema": Field(SCHEMA, SCHEMA, grammar("json_schema"), (5, True, [1])),
    "regex": Field("a+", "a+", sampling("regex"), STRING),
    "ebnf": Field('root ::= "a"', 'root ::= "a"', sampling("ebnf"), STRING),
    "grammar": Field('root ::= "a"', 'root ::= "a"', sampling("ebnf"), STRING),
    "structural_tag": Field(TAG, TAG, grammar("structural_tag"), (5, True, [1])),
    "guided_json": Field(json.dumps(SCHEMA), SCHEMA, grammar("json_schema"), (5, True, [1])),
    "guided_regex": Field("a+", "a+", sampling("regex"), STRING),
    "guided_choice": Field(["a"], 'root ::= "a"', sampling("ebnf"), WORDS),
    "guided_grammar": Field('root ::= "a"', 'root ::= "a"', sampling("ebnf"), STRING),
    "guided_json_object": Field(True, {"type": "object"}, grammar("json_schema"), BOOL),
}
COMPLETIONS: dict[str, Field] = {
    **SHARED,
    "prompt": Field([1, 2], "\x01\x02", prompt, (5, True, {}, [True], [{}])),
    "logprobs": Field(
        0, 0, lambda got, _: got[0].top_logprobs if got[0].return_logprob else None, ("5", 1.5, True, [])
    ),
    "echo": Field(True, "hello" + TEXT, said, BOOL),
    "add_special_tokens": Field(False, "hello", prompt, BOOL),
}
TEMPLATED: dict[str, Field] = {
    "chat_template_kwargs": Field({"mood": "glad"}, "<|user|>hello\nglad<|assistant|>", prompt, OBJECT),
    "parallel_tool_calls": Field(False, TEXT, said, BOOL),
}
CHAT: dict[str, Field] = {
    **SHARED,
    **TEMPLATED,
    "messages": Field(USER, "<|user|>hello\n<|assistant|>", prompt, ("x", 5, {}, ["x"], [5])),
    "max_completion_tokens": Field(2, "hello wor", said, INT),
    "tools": Field([TOOL], True, lambda got, _: '"name": "f"' in prompt(got, {}), ("x", 5, {}, ["x"], [5])),
    "tool_choice": Field(
        "required",
        True,
        lambda got, _: got[0].sampling.structural_tag is not None,
        (5, True, [], "any", {"type": "function"}),
        {"tools": [TOOL]},
    ),
    "reasoning_effort": Field("low", "<|user|>hello\nlow<|assistant|>", prompt, STRING),
    "include_reasoning": Field(False, TEXT, said, BOOL),
    "logprobs": Field(True, True, request("return_logprob"), ("true", 1, [], {})),
    "top_logprobs": Field(3, 3, request("top_logprobs"), INT, {"logprobs": True}),
    "add_generation_prompt": Field(False, "<|user|>hello\n", prompt, BOOL),
    "add_special_tokens": Field(True, "<|user|>hello\n<|assistant|>", prompt, BOOL),
}
RESPONSES: dict[str, Field] = {
    **SAMPLED,
    **ROUTED,
    **TEMPLATED,
    "input": Field(USER, "<|user|>hello\n<|assistant|>", prompt, (5, True, {}, ["x"], [5])),
    "model": SHARED["model"],
    "instructions": Field("Be.", "<|system|>Be.\n<|user|>hello\n<|assistant|>", prompt, STRING),
    "previous_response_id": Field(None, None, answered("previous_response_id"), STRING),
    "max_output_tokens": Field(2, "hello wor", said, INT),
    "tools": Field([FLAT_TOOL], True, lambda got, _: '"name": "f"' in prompt(got, {}), ("x", 5, {}, ["x"], [TOOL])),
    "tool_choice": Field(
        {"type": "function", "name": "f"},
        True,
        lambda got, _: got[0].sampling.structural_tag is not None,
        (5, True, [], "any", {"type": "function"}),
        {"tools": [FLAT_TOOL]},
    ),
    "text": Field(
        {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, SCHEMA, grammar("json_schema"), OBJECT
    ),
    "reasoning": Field({"effort": "low"}, "<|user|>hello\nlow<|assistant|>", prompt, OBJECT),
    "stream": SHARED["stream"],
    "store": Field(False, False, answered("store"), BOOL),
    "background": Field(False, False, answered("background"), BOOL),
    "truncation": Field("auto", "auto", answered("truncation"), (5, True, [], "always")),
    "metadata": Field({"a": "b"}, {"a": "b"}, answered("metadata"), OBJECT),
    "user": Field("me", "me", answered("user"), STRING),
    "request_id": SHARED["request_id"],
}
MESSAGES: dict[str, Field] = {
    **{name: SAMPLED[name] for name in ("temperature", "top_p", "top_k", "seed")},
    "messages": CHAT["messages"],
    "model": SHARED["model"],
    "system": Field("Be.", "<|system|>Be.\n<|user|>hello\n<|assistant|>", prompt, (5, True, {}, [5])),
    "max_tokens": Field(2, "hello wor", said, INT),
    "stop_sequences": Field(["zz", "ld,"], "hello wor", said, WORDS),
    "tools": Field(
        [{"name": "f", "input_schema": SCHEMA}],
        True,
        lambda got, _: '"name": "f"' in prompt(got, {}),
        ("x", 5, {}, ["x"], [{}]),
    ),
    "tool_choice": Field(
        {"type": "any"},
        True,
        lambda got, _: got[0].sampling.structural_tag is not None,
        (5, True, [], "any", {"type": "function"}),
        {"tools": [{"name": "f"}]},
    ),
    "thinking": Field({"type": "enabled"}, "<|user|>hello\nTrue<|assistant|>", prompt, (5, True, "enabled", {})),
    "stream": SHARED["stream"],
    "request_id": SHARED["request_id"],
}
NATIVE: dict[str, Field] = {
    "text": Field("hello", "hello", prompt, (5, True, {}, [5])),
    "input_ids": Field([1, 2], "\x01\x02", prompt, (5, True, {}, [True], [{}], "x"), {"text": None}),
    "rid": Field("mine", "mine", answered("meta_info", "id"), (5, True, {}, [5])),
    "return_logprob": Field(True, True, request("return_logprob"), BOOL),
    "logprob_start_len": Field(0, 0, request("prompt_logprobs"), INT, {"return_logprob": True}),
    "top_logprobs_num": Field(2, 2, request("top_logprobs"), INT, {"return_logprob": True}),
    "return_text_in_logprobs": Field(
        False, None, answered("meta_info", "output_token_logprobs", 0, 2), BOOL, {"return_logprob": True}
    ),
    "stream": SHARED["stream"],
    "sampling_params": Field({"top_k": 5}, 5, sampling("top_k"), ("x", 5, True, ["x"])),
    **ROUTED,
}
NATIVE_SAMPLING: dict[str, Field] = {
    **SAMPLED,
    **STOPPED,
    "n": Field(1, 1, count, INT),
    "max_new_tokens": Field(2, "hello wor", said, INT),
    "min_new_tokens": Field(5, 5, sampling("min_new_tokens"), INT),
    "sampling_seed": Field(3, 3, sampling("seed"), INT),
    "no_stop_trim": Field(True, "hello world", said, BOOL, {"stop": "ld"}),
    "json_schema": Field(json.dumps(SCHEMA), SCHEMA, grammar("json_schema"), STRING),
    "regex": SHARED["regex"],
    "ebnf": SHARED["ebnf"],
    "structural_tag": Field(json.dumps(TAG), TAG, grammar("structural_tag"), STRING),
}
ROUTES: dict[str, tuple[str, str, Json, dict[str, Field]]] = {
    "completions": ("/v1/completions", "CompletionRequest", {"prompt": "hello"}, COMPLETIONS),
    "chat": ("/v1/chat/completions", "ChatRequest", {"messages": USER}, CHAT),
    "responses": ("/v1/responses", "ResponsesRequest", {"input": "hello"}, RESPONSES),
    "messages": ("/v1/messages", "MessagesRequest", {"messages": USER, "max_tokens": 40}, MESSAGES),
    "generate": ("/generate", "GenerateFields", {"text": "hello"}, NATIVE),
    "generate, sampling": ("/generate", "", {"text": "hello"}, NATIVE_SAMPLING),
}
EACH = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    engine = ScriptedEngine(script=says([*TOKENIZER.encode(TEXT), EOS]), info=engine_info(max_model_len=1024))
    with live_server(engine, template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client


def body_of(route: str, fields: Json) -> Json:
    _, _, body, _ = ROUTES[route]
    return {**body, "sampling_params": fields} if route == "generate, sampling" else {**body, **fields}


@EACH
def test_every_field_that_the_document_lists_is_tried(http: httpx.Client, route: str) -> None:
    _, name, _, fields = ROUTES[route]
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert not name or set(fields) == set(schemas[name]["properties"])


@EACH
def test_every_field_has_its_effect(http: httpx.Client, live: LiveServer, route: str) -> None:
    path, _, _, fields = ROUTES[route]
    for name, field in fields.items():
        before = len(live.engine.requests)
        usual = {"max_tokens": 14} if path == "/v1/completions" else {}
        answer = http.post(path, json=body_of(route, {**usual, **field.beside, name: field.good}))
        assert answer.status_code == 200, (name, answer.text)
        assert field.does(live.engine.requests[before:], answer.json()) == field.shows, name
        if name == "request_id":
            assert answer.headers["x-request-id"] == "mine"


@EACH
def test_every_field_of_another_type_is_a_400_that_names_it_before_anything_runs(
    http: httpx.Client, live: LiveServer, route: str
) -> None:
    path, _, _, fields = ROUTES[route]
    before, streams = len(live.engine.requests), itertools.cycle((True, False))
    for name, field in fields.items():
        for wrong in field.wrong:
            body = body_of(route, {**field.beside, name: wrong})
            answer = http.post(path, json=body if name == "stream" else {**body, "stream": next(streams)})
            assert answer.status_code == 400, (name, wrong, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert name in error["param"].replace("[", ".").split("."), (name, wrong, error)
            assert f"{name}" in error["message"]
    assert len(live.engine.requests) == before


@EACH
def test_null_is_the_same_as_leaving_a_field_out(http: httpx.Client, route: str) -> None:
    path, _, body, fields = ROUTES[route]
    for name in fields:
        if name not in body:
            assert http.post(path, json=body_of(route, {name: None})).status_code == 200, name


def test_every_choice_is_asked_for_with_the_same_fields_and_a_seed_of_its_own(
    http: httpx.Client, live: LiveServer
) -> None:
    before = len(live.engine.requests)
    fields = {"logit_bias": {"5": -100}, "bad_words": ["x"], "allowed_token_ids": [97, 98], "seed": 5, "n": 3}
    assert http.post("/v1/completions", json={"prompt": ["a", "b"], **fields}).status_code == 200
    asked = [one.sampling for one in live.engine.requests[before:]]
    assert [one.seed for one in asked] == [5, 6, 7] * 2
    assert len({attrs.evolve(one, seed=None) for one in asked}) == 1
