"""Bad requests: a 4xx in the API's envelope that names field, value and what is allowed; then business as usual."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from frontend_rig import LiveServer, live_server
from scripted_engine import VOCAB

from tokenspeed.settings.model import ServerSettings


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(settings=ServerSettings(port=0, max_body_mib=1.0)) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    """The error object, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(body) == {"error"}
    error: dict[str, str] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def still_serves(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 2
    assert http.get("/health").status_code == 200


PROMPT = {"prompt": "hello", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}

TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}

COMPLETION_FAULTS: list[tuple[dict[str, object], str, str]] = [
    # fields, param, something the message says
    ({"prompt": ""}, "prompt", "''"),
    ({"prompt": [""]}, "prompt[0]", "''"),
    ({"prompt": []}, "prompt", "[]"),
    ({"prompt": [[]]}, "prompt[0]", "[]"),
    ({"prompt": ["ok", ""]}, "prompt[1]", "''"),
    ({"prompt": ["ok", 3]}, "prompt", "token ids"),
    ({"prompt": [[1], 2]}, "prompt", "token ids"),
    ({"prompt": None}, "prompt", "null"),
    ({"prompt": {"text": "x"}}, "prompt", "a string"),
    ({"prompt": [1.5]}, "prompt[0]", "1.5"),
    ({"prompt": [["12"]]}, "prompt[0][0]", "'12'"),
    ({"prompt": [-1]}, "prompt[0]", "-1"),
    ({"prompt": [1, VOCAB]}, "prompt[1]", f"0 to {VOCAB - 1}"),
    ({"prompt": [1, VOCAB + 1]}, "prompt[1]", str(VOCAB + 1)),
    ({"prompt": [2**31]}, "prompt[0]", str(2**31)),
    ({"prompt": [2**63]}, "prompt[0]", str(2**63)),
    ({"prompt": [[1], [2**64]]}, "prompt[1][0]", str(2**64)),
    ({"prompt": "x" * 256}, "prompt", "at most 255 tokens"),
    ({"prompt": [1] * 300}, "prompt", "300 tokens"),
    ({"prompt": ["ok", "x" * 300]}, "prompt[1]", "300 tokens"),
    ({"prompt": "x" * 10_000}, "prompt", "10000 characters"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"max_tokens": 2**63}, "max_tokens", str(2**31 - 1)),
    ({"max_tokens": "5"}, "max_tokens", "'5'"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": True}, "max_tokens", "True"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"min_tokens": 3}, "min_tokens", "at most max_tokens (2)"),
    ({"temperature": -1}, "temperature", "from 0 to 100"),
    ({"temperature": "nan"}, "temperature", "'nan'"),
    ({"temperature": True}, "temperature", "True"),
    ({"temperature": 101}, "temperature", "101"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": -0.1}, "min_p", "-0.1"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "-2 to 2"),
    ({"presence_penalty": -2.5}, "presence_penalty", "-2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"n": 0}, "n", "0"),
    ({"n": 17}, "n", "1 to 16"),
    ({"n": 10**6}, "n", "1000000"),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"logprobs": 2 * 10**9}, "logprobs", "2000000000"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "21"),
    ({"stop": ["x"] * 1000}, "stop", "at most 16"),
    ({"stop": [""]}, "stop[0]", "''"),
    ({"stop": ""}, "stop", "''"),
    ({"stop": [1]}, "stop[0]", "str"),
    ({"stop": "x" * 2000}, "stop", "1024"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]", str(VOCAB)),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "-1"),
    ({"stop_token_ids": ["12"]}, "stop_token_ids[0]", "'12'"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids", "128"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias key", str(VOCAB)),
    ({"logit_bias": {"-1": 1}}, "logit_bias key", "-1"),
    ({"logit_bias": {"a": 1}}, "logit_bias key", "'a'"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias key", "1.5"),
    ({"logit_bias": {str(2**63): 1}}, "logit_bias key", str(2**63)),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]", "101"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "float"),
    ({"logit_bias": [1]}, "logit_bias", "an object"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "bool"),
    ({"echo": 1}, "echo", "true or false"),
    ({"model": 3}, "model", "3"),
    ({"best_of": 3}, "best_of", "not supported yet"),
    ({"suffix": "x"}, "suffix", "not supported yet"),
    ({"bad_words": [""]}, "bad_words[0]", "''"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "token id"),
    ({"logits_processors": ["x"]}, "logits_processors", "not supported yet"),
    ({"guided_json": 3}, "guided_json", "3"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice", "at most one"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json and regex", "exactly one"),
    ({"lora_path": "/x"}, "lora_path", "not supported yet"),
    ({"request_id": ""}, "request_id", "''"),
    ({"request_id": "x" * 100_000}, "request_id", "256"),
    ({"request_id": "a\nb"}, "request_id", "printable"),
    ({"cache_salt": ""}, "cache_salt", "''"),
    ({"priority": 2**40}, "priority", str(2**40)),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("fields", "param", "says"), COMPLETION_FAULTS, ids=[json.dumps(row[0])[:40] for row in COMPLETION_FAULTS]
)
def test_a_bad_completion_field_is_refused_before_anything_runs(
    http: httpx.Client, live: LiveServer, fields: dict[str, object], param: str, says: str, *, stream: bool
) -> None:
    before = len(live.engine.requests)
    error = error_of(http.post("/v1/completions", json={**PROMPT, "stream": stream, **fields}), 400)
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(live.engine.requests) == before
    still_serves(http)


CHAT_FAULTS: list[tuple[dict[str, object], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": None}, "messages", "null"),
    ({"messages": "hi"}, "messages", "'hi'"),
    ({"messages": ["hi"]}, "messages[0]", "'hi'"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "None"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "3"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "None"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "not supported yet",
    ),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'function'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "name and arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls", "a list of calls"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "messages[0].tool_call_id", "3"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "at most 255 tokens"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "9000 characters"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": True, "top_logprobs": 2 * 10**9}, "top_logprobs", "2000000000"),
    ({"logprobs": 3}, "logprobs", "true or false"),
    ({"response_format": {"type": "zzz"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "schema"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name", "two words"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "no other tool"),
    ({"tools": "f"}, "tools", "a list"),
    ({"tool_choice": "required"}, "tool_choice", "tools to choose from"),
    ({"tool_choice": "any"}, "tool_choice", "'any'"),
    ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice.function.name", "one of the tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"reasoning_effort": 3}, "reasoning_effort", "3"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
    ({"modalities": ["audio"]}, "modalities", "not supported yet"),
    ({"audio": {"voice": "x"}}, "audio", "not supported yet"),
    ({"temperature": 1e300}, "temperature", "1e+300"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("fields", "param", "says"), CHAT_FAULTS, ids=[json.dumps(row[0])[:40] for row in CHAT_FAULTS])
def test_a_bad_chat_field_is_refused_before_anything_runs(
    http: httpx.Client, live: LiveServer, fields: dict[str, object], param: str, says: str, *, stream: bool
) -> None:
    before = len(live.engine.requests)
    error = error_of(http.post("/v1/chat/completions", json={**CHAT, "stream": stream, **fields}), 400)
    assert error["param"] == param
    assert says in error["message"]
    assert len(live.engine.requests) == before
    still_serves(http)


RAW_FAULTS: list[tuple[str, bytes, str]] = [
    ("empty body", b"", "empty"),
    ("blank body", b"  \n ", "empty"),
    ("not JSON", b"hello", "line 1 column 1"),
    ("cut short", b'{"prompt": "x"', "line 1 column"),
    ("trailing text", b'{"prompt": "x"} y', "line 1 column"),
    ("a list", b"[1, 2]", "expected a JSON object"),
    ("a string", b'"prompt"', "expected a JSON object"),
    ("null", b"null", "expected a JSON object"),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}', "not valid UTF-8: byte 12 is 0xff"),
    ("invalid UTF-8 outside", b'\xff{"prompt": "x"}', "not valid UTF-8: byte 0"),
    ("encoded surrogate", b'{"prompt": "\xed\xa0\x80"}', "not valid UTF-8"),
    ("lone surrogate", b'{"prompt": "a\\ud800b"}', "prompt: 'a\\ud800b' is not allowed"),
    ("lone low surrogate", b'{"prompt": "\\udc00"}', "prompt:"),
    ("surrogate in a key", b'{"\\ud800": 1, "prompt": "x"}', "field names of valid Unicode"),
    ("NaN", b'{"prompt": "x", "temperature": NaN}', "temperature: nan is not allowed; expected a number from 0 to 100"),
    ("Infinity", b'{"prompt": "x", "top_p": Infinity}', "top_p: inf is not allowed; expected a number above 0"),
    ("-Infinity", b'{"prompt": "x", "min_p": -Infinity}', "min_p: -inf"),
    ("1e400", b'{"prompt": "x", "temperature": 1e400}', "temperature: inf"),
    ("-1e400", b'{"prompt": "x", "presence_penalty": -1e400}', "presence_penalty: -inf"),
    ("NaN as integer", b'{"prompt": "x", "max_tokens": NaN}', "max_tokens: nan"),
    (
        "NaN in a map",
        b'{"prompt": "x", "logit_bias": {"1": NaN}}',
        "logit_bias.1: nan is not allowed; expected a finite number",
    ),
    ("NaN in an ignored field", b'{"prompt": "x", "metadata": {"a": [NaN]}}', "metadata.a[0]: nan"),
    ("twice the same field", b'{"prompt": "x", "n": 1, "n": 2}', "'n' is given twice, last as 2"),
    ("twice in a nested object", b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "'1' is given twice"),
    ("a colon does not hide it", b'{"prompt": "a:b\\":", "n": 1, "n": 2}', "'n' is given twice"),
    ("huge number", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "digit"),
    ("deep nesting", b'{"prompt": ' + b"[" * 800 + b"]" * 800 + b"}", "prompt"),
    ("very deep nesting", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ("very deep objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
    ("unclosed nesting", b"[" * 200_000, "nested too deeply"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(("body", "says"), [row[1:] for row in RAW_FAULTS], ids=[row[0] for row in RAW_FAULTS])
def test_a_body_that_is_no_proper_json_object_is_refused(http: httpx.Client, path: str, body: bytes, says: str) -> None:
    error = error_of(http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    if path == "/v1/completions":
        assert says in error["message"]
    still_serves(http)


def test_a_body_over_the_limit_is_refused_with_or_without_its_length(http: httpx.Client, live: LiveServer) -> None:
    body = json.dumps({**PROMPT, "prompt": "x" * 10_000_000}).encode()
    told = error_of(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 413)
    assert "1048576 bytes" in told["message"]
    pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
    chunked = http.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
    error_of(chunked, 413)
    assert chunked.headers["connection"] == "close"
    still_serves(http)


def test_a_body_just_within_the_limit_is_read(http: httpx.Client) -> None:
    filler = "x" * (1024 * 1024 - 200)
    error = error_of(http.post("/v1/completions", json={**PROMPT, "user": filler, "top_p": 7}), 400)
    assert error["param"] == "top_p"
    assert http.post("/v1/completions", json={**PROMPT, "user": filler}).status_code == 200


def test_another_content_type_or_coding_is_refused(http: httpx.Client) -> None:
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"):
        error_of(http.post("/v1/completions", content=b'{"prompt":"x"}', headers={"content-type": kind}), 415)
    coded = {"content-type": "application/json", "content-encoding": "gzip"}
    error_of(http.post("/v1/completions", content=b"x", headers=coded), 415)
    plain = {"content-type": "application/json; charset=utf-8"}
    assert http.post("/v1/completions", content=b'{"prompt":"x"}', headers=plain).status_code == 200


def test_an_endless_field_name_makes_no_endless_answer(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**PROMPT, "logit_bias": {"k" * 500_000: 1}, "user": "v" * 400_000})
    error_of(answer, 400)
    assert len(answer.content) < 2000


def test_every_fault_is_told_at_once(http: httpx.Client) -> None:
    fields = {"temperature": -1, "top_p": "x", "suffix": "y", "n": 0}
    message = error_of(http.post("/v1/completions", json={**PROMPT, **fields}), 400)["message"]
    for name in fields:
        assert f"{name}:" in message


def test_an_unknown_model_is_404_for_every_route_that_names_one(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        for stream in ({}, {"stream": True}) if "max_tokens" in body else ({},):
            error = error_of(http.post(path, json={**body, **stream, "model": "gpt-9"}), 404)
            assert error["code"] == "model_not_found"
            assert "'gpt-9'" in error["message"]
            assert "'scripted'" in error["message"]
    error_of(http.get("/v1/models/gpt-9"), 404)
    error_of(http.get("/v1/models/org/name"), 404)
    still_serves(http)


def test_what_is_missing_is_told_in_words_of_json(http: httpx.Client) -> None:
    tool = {**CHAT, "tools": [{"type": "function"}]}
    for path, body, told in (
        ("/v1/chat/completions", {}, "messages: leaving it out is not allowed; expected a list of items"),
        ("/v1/chat/completions", {"messages": None}, "messages: null is not allowed; expected a list of items"),
        ("/v1/chat/completions", tool, "expected an object with a field function"),
    ):
        assert told in error_of(http.post(path, json=body), 400)["message"]


def test_words_that_a_field_takes_are_told_also_where_it_lies_deep(http: httpx.Client) -> None:
    for body, told in (
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type: 'custom' is not allowed; expected 'function'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "function": {"name": "f"}}},
            "tool_choice.type: 'allowed_tools' is not allowed; expected 'function'",
        ),
    ):
        assert error_of(http.post("/v1/chat/completions", json={**CHAT, **body}), 400)["message"] == told


@pytest.mark.parametrize("number", ["2.0", "2e0", "20E-1"])
def test_an_integer_is_one_however_it_is_written(http: httpx.Client, live: LiveServer, number: str) -> None:
    sent = {"content": f'{{"prompt": "hello", "max_tokens": {number}, "top_k": {number}, "n": 1.0, "seed": null}}'}
    answer = http.post("/v1/completions", headers={"content-type": "application/json"}, **sent)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
    assert live.engine.requests[-1].sampling.top_k == 2
    for far in ("2.5", "1e300", "1e999"):
        sent = {"content": f'{{"prompt": "hello", "max_tokens": {far}}}'}
        answer = http.post("/v1/completions", headers={"content-type": "application/json"}, **sent)
        assert error_of(answer, 400)["param"] == "max_tokens"


def test_the_best_of_as_many_as_are_wanted_is_all_of_them(http: httpx.Client) -> None:
    for fields in ({"best_of": 2, "n": 2}, {"best_of": 1}, {"best_of": 1, "n": 1}):
        answer = http.post("/v1/completions", json={**PROMPT, **fields})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == fields.get("n", 1)
    assert error_of(http.post("/v1/completions", json={**PROMPT, "best_of": 3, "n": 2}), 400)["param"] == "best_of"


def test_unknown_paths_and_methods_have_the_envelope_too(http: httpx.Client) -> None:
    error = error_of(http.get("/v2/nothing"), 404)
    assert error["message"] == "there is no route '/v2/nothing'; GET /openapi.json lists all of them"
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/health", "/health"),
        ("//v1/completions", "/v1/completions"),
        ("/v1//completions", "/v1/completions"),
        ("/v1/v1/completions", "/v1/completions"),
    ):
        assert error_of(http.post(path, json={}), 404)["message"].endswith(f"did you mean {meant}?")
    assert len(error_of(http.get("/x" * 2000), 404)["message"]) < 400
    for path, method in (("/v1/completions", "GET"), ("/health", "POST"), ("/v1/models", "DELETE")):
        answer = http.request(method, path)
        assert answer.headers["allow"] in error_of(answer, 405)["message"]
    allowed = http.request("PATCH", "/v1/responses/x").headers["allow"]
    assert {method.strip() for method in allowed.split(",")} == {"GET", "HEAD", "DELETE"}
    assert http.head("/version").status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations", "/v1/load_lora_adapter", "/rerank"])
def test_what_this_build_does_not_serve_says_so(http: httpx.Client, path: str) -> None:
    error = error_of(http.post(path, json={"input": "x", "model": "scripted"}), 400)
    assert error["code"] == "not_supported"
    assert "not supported by this server yet" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
)
def test_bad_text_tool_requests_are_refused(
    http: httpx.Client, path: str, fields: dict[str, object], param: str
) -> None:
    assert error_of(http.post(path, json=fields), 400)["param"] == param


def test_unknown_fields_are_ignored_whatever_they_hold(http: httpx.Client) -> None:
    new = {"temprature": -3, "entirely_new": {"deep": [None, {"a": []}]}, "timeout": "x", "messages": 3, "": 0}
    answer = http.post("/v1/completions", json={**PROMPT, **new})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert http.post("/v1/chat/completions", json={**CHAT, "prompt": 3, "temprature": -3}).status_code == 200
    assert http.post("/detokenize", json={"tokens": [1], "extra": 1}).status_code == 200
    nested = {"stream_options": {"include_usage": True, "new": 1}, "stream": True}
    assert http.post("/v1/completions", json={**PROMPT, **nested}).status_code == 200


def test_fields_that_clients_send_by_habit_are_accepted(http: httpx.Client) -> None:
    habits = {
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "tools": [],
        "tool_choice": "none",
        "logit_bias": None,
        "stop": None,
        "seed": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "spaces_between_special_tokens": True,
        "max_tokens": None,
        "max_completion_tokens": 2,
        "temperature": -0.0,
        "min_p": 1e-8,
        "top_p": 1,
    }
    answer = http.post("/v1/chat/completions", json={**CHAT, **habits})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
