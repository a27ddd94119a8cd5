"""Completions and chat in detail: usage, choices, echo, log-probabilities, streams."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from frontend_rig import LiveServer, live_server
from piece_tokenizer import EOS, PieceTokenizer, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info, logprob_of

from tokenspeed.plane.messages import GenerateRequest
from tokenspeed.settings.model import ServerSettings

TOKENIZER = piece_tokenizer()
TEXT = "hello world, 日本é the end"


def script(request: GenerateRequest) -> list[int]:
    return [*([122] * ((request.sampling.seed or 0) % 10)), *TOKENIZER.encode(TEXT), EOS]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(script=script, cached=2)) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client


def post(http: httpx.Client, path: str, **body: object) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, path: str, **body: object) -> list[Any]:
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    parts = answer.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


ENDPOINTS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 5, "seed": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 3},
}


@pytest.mark.parametrize("path", list(ENDPOINTS))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("include", "continuous"), list(itertools.product((False, True), repeat=2)))
def test_usage_in_streams(http: httpx.Client, path: str, n: int, *, include: bool, continuous: bool) -> None:
    body = {**ENDPOINTS[path], "n": n}
    plain = post(http, path, **body)["usage"]
    assert isinstance(plain, dict)
    assert plain["completion_tokens"] == 5 * n
    assert plain["total_tokens"] == plain["prompt_tokens"] + 5 * n
    assert plain["prompt_tokens_details"] == {"cached_tokens": min(2, plain["prompt_tokens"] - 1)}
    options = {"include_usage": include, "continuous_usage_stats": continuous}
    chunks = events(http, path, **body, stream_options=options)
    last = chunks.pop() if include else None
    assert all(chunk["choices"] for chunk in chunks)
    if last is not None:
        assert last["choices"] == []
        assert last["usage"] == plain
    running = [chunk["usage"] for chunk in chunks if chunk.get("usage") is not None]
    if continuous:
        assert len(running) == len(chunks)
        totals = [usage["completion_tokens"] for usage in running if isinstance(usage, dict)]
        assert totals == sorted(totals)
        assert running[-1] == plain
    else:
        assert running == []


def test_the_prompt_is_counted_once_for_each_prompt_not_for_each_choice(http: httpx.Client) -> None:
    usage = post(http, "/v1/completions", prompt=["hello", "hello world"], n=2, max_tokens=1)["usage"]
    assert isinstance(usage, dict)
    assert usage["prompt_tokens"] == 1 + 3
    assert usage["completion_tokens"] == 4


def test_choices_of_several_prompts_are_numbered_through(http: httpx.Client, live: LiveServer) -> None:
    prompts: list[object] = ["hello", [104, 105]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "seed": 1, "echo": True}
    choices = post(http, "/v1/completions", **body)["choices"]
    assert isinstance(choices, list)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == ["hellozhello wor", "hellozzhello", "hizhello wor", "hizzhello"]
    streamed = dict.fromkeys(range(4), "")
    for chunk in events(http, "/v1/completions", **body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [choice["text"] for choice in choices]


def test_every_choice_of_a_stream_ends_exactly_once(http: httpx.Client) -> None:
    chunks = events(http, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], n=4, seed=0)
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


# ---- log-probabilities and echo ----


def columns(choice: Any) -> dict[str, list[object]]:
    found = choice["logprobs"]
    assert isinstance(found, dict)
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(column) for column in found.values()}) == 1
    return found


@pytest.mark.parametrize("logprobs", [0, 1, 3])
def test_completion_logprobs_have_one_entry_a_token_the_token_among_them(http: httpx.Client, logprobs: int) -> None:
    (choice,) = post(http, "/v1/completions", prompt="x", max_tokens=50, logprobs=logprobs)["choices"]
    found = columns(choice)
    ids = [*TOKENIZER.encode(TEXT), EOS]
    assert found["token_logprobs"] == [logprob_of(token) for token in ids]
    for token, value, table in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert isinstance(table, dict)
        assert table[token] == value
        assert len(table) in ({1} if logprobs == 0 else {logprobs, logprobs + 1})
    for token, offset in zip(found["tokens"][:-1], found["text_offset"], strict=False):
        assert isinstance(token, str)
        assert isinstance(offset, int)
        assert choice["text"][offset:].startswith(token)


def test_streamed_completion_logprobs_are_the_plain_ones_cut_in_pieces(http: httpx.Client) -> None:
    body = {"prompt": "hello world", "max_tokens": 9, "logprobs": 2, "echo": True}
    (plain,) = post(http, "/v1/completions", **body)["choices"]
    joined: dict[str, list[object]] = {}
    for chunk in events(http, "/v1/completions", **body):
        for name, column in columns(chunk["choices"][0]).items():
            joined.setdefault(name, []).extend(column)
    assert joined == columns(plain)


def test_tokens_that_are_no_whole_character_have_keys_of_their_own(http: httpx.Client, live: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 2, "logprobs": 0, "logit_bias": {"0": 1}, "seed": 0}
    live.engine.script = lambda _: [0xE6, 0x97]
    try:
        (choice,) = post(http, "/v1/completions", **body)["choices"]
    finally:
        live.engine.script = script
    assert columns(choice)["tokens"] == ["bytes:\\xe6", "bytes:\\x97"]
    assert choice["text"] == "�"


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_echo_with_logprobs_scores_the_prompt(http: httpx.Client, max_tokens: int, *, stream: bool) -> None:
    ids = TOKENIZER.encode("hello world")
    for prompt in ("hello world", ids):
        body = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
        if stream:
            chunks = events(http, "/v1/completions", **body)
            choice, usage = chunks[0]["choices"][0], None
        else:
            whole = post(http, "/v1/completions", **body)
            choice, usage = whole["choices"][0], whole["usage"]
        found = columns(choice)
        new = [122] * 0 + TOKENIZER.encode(TEXT)[:max_tokens]
        assert found["token_logprobs"] == [None, *(logprob_of(token) for token in [*ids[1:], *new])]
        assert found["tokens"] == [TOKENIZER.decode([token]) for token in [*ids, *new]]
        assert found["text_offset"] == [0, 5, 9, 11][: len(ids) + max_tokens]
        assert found["top_logprobs"][0] is None
        assert choice["text"] == "hello world" + TOKENIZER.decode(new)
        assert choice["finish_reason"] == "length"
        if isinstance(usage, dict):
            assert usage["completion_tokens"] == max_tokens
            assert usage["prompt_tokens"] == len(ids)


def test_echo_offsets_point_into_the_text_though_the_prompt_begins_with_a_bos() -> None:
    tokenizer: PieceTokenizer = piece_tokenizer(bos=256)
    with live_server(tokenizer=tokenizer) as live, httpx.Client(base_url=live.url) as http:
        body = {"prompt": "hello world", "max_tokens": 0, "logprobs": 0, "echo": True}
        (choice,) = post(http, "/v1/completions", **body)["choices"]
        assert choice["text"] == "hello world"
        assert columns(choice)["text_offset"] == [0, 0, 5, 9]


def test_prompt_logprobs_of_a_chat(http: httpx.Client, live: LiveServer) -> None:
    messages = [{"role": "user", "content": "x"}]
    answer = post(http, "/v1/chat/completions", messages=messages, max_tokens=1, prompt_logprobs=1)
    ids = live.engine.requests[-1].input_ids.tolist()
    found = answer["prompt_logprobs"]
    assert isinstance(found, list)
    assert found[0] is None
    for token, table in zip(ids[1:], found[1:], strict=True):
        assert table[str(token)] == {"logprob": logprob_of(token), "decoded_token": TOKENIZER.decode([token])}


def test_no_logprobs_means_null(http: httpx.Client) -> None:
    for path, body in ENDPOINTS.items():
        assert post(http, path, **body)["choices"][0]["logprobs"] is None


# ---- stopping ----


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_a_stop_string_inside_a_token_cuts_text_and_usage_alike(http: httpx.Client, path: str, *, stream: bool) -> None:
    body = {**ENDPOINTS[path], "max_tokens": 40, "seed": 0, "stop": ["rld, 日", "zzz"]}
    body["stream_options" if stream else "n"] = {"include_usage": True} if stream else 1
    if stream:
        chunks = events(http, path, **body)
        usage = chunks.pop()["usage"]
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
        last = choices[-1]
    else:
        whole = post(http, path, **body)
        usage, last = whole["usage"], whole["choices"][0]
        text = last["text"] if "text" in last else last["message"]["content"]
    assert text == "hello wo"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "rld, 日")
    assert isinstance(usage, dict)
    assert usage["completion_tokens"] == len(TOKENIZER.encode("hello world, 日本"))


def test_stop_tokens_min_tokens_and_ignore_eos_reach_engine_and_answer(http: httpx.Client, live: LiveServer) -> None:
    (choice,) = post(http, "/v1/completions", prompt="x", stop_token_ids=[ord(",")])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("hello world", ord(","))
    (choice,) = post(http, "/v1/completions", prompt="x", max_tokens=30, ignore_eos=True)["choices"]
    assert choice["finish_reason"] == "length"
    post(http, "/v1/completions", prompt="x", max_tokens=9, min_tokens=8)
    assert live.engine.requests[-1].sampling.min_new_tokens == 8


def test_special_tokens_are_shown_on_request(http: httpx.Client) -> None:
    (choice,) = post(http, "/v1/completions", prompt="x", max_tokens=50, ignore_eos=False)["choices"]
    assert choice["text"] == TEXT
    body = {"prompt": "x", "max_tokens": 14, "ignore_eos": True, "skip_special_tokens": False}
    (choice,) = post(http, "/v1/completions", **body)["choices"]
    assert "<|eos|>" in choice["text"]


# ---- others ----


def test_an_event_is_one_line_whatever_signs_the_model_makes(http: httpx.Client, live: LiveServer) -> None:
    text = "a\x85b\u2028c\u2029d\ne\r\x1cf\x0c"
    live.engine.script = lambda _: [*text.encode(), EOS]
    try:
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 50, "stream": True})
    finally:
        live.engine.script = script
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    assert "".join(json.loads(one)["choices"][0]["text"] for one in data[:-1]) == text


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    for prefix in ("", "/v1"):
        found = post(http, f"{prefix}/tokenize", prompt=TEXT, return_token_strs=True)
        assert found["tokens"] == TOKENIZER.encode(TEXT)
        assert found["count"] == len(TOKENIZER.encode(TEXT))
        assert found["max_model_len"] == 256
        assert found["token_strs"][0] == "hello"
        assert post(http, f"{prefix}/detokenize", tokens=found["tokens"]) == {"prompt": TEXT}
    chat = post(http, "/tokenize", messages=[{"role": "user", "content": "x"}])
    assert TOKENIZER.decode(chat["tokens"]) == "<|user|>x\n<|assistant|>"
    long = post(http, "/tokenize", prompt="x" * 20_000)
    assert long["count"] == 20_000


def test_chat_template_options_reach_the_template(http: httpx.Client, live: LiveServer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    post(http, "/v1/chat/completions", messages=messages, add_generation_prompt=False, max_tokens=1)
    assert TOKENIZER.decode(live.engine.requests[-1].input_ids.tolist()) == "<|user|>x\n<|assistant|>y\n"


def test_a_model_without_a_chat_template_says_so() -> None:
    with live_server(chat=False) as live, httpx.Client(base_url=live.url) as http:
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]


def test_priority_and_salt_are_passed_on(http: httpx.Client, live: LiveServer) -> None:
    post(http, "/v1/completions", prompt="x", priority=-3, cache_salt="me")
    request = live.engine.requests[-1]
    assert (request.priority, request.cache_salt) == (-3, b"me")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_full_engine_answers_429_with_retry_after_before_any_stream(*, stream: bool) -> None:
    engine = ScriptedEngine(info=engine_info(max_waiting=2, max_num_seqs=1))
    engine.allow(0)
    with live_server(engine) as live, httpx.Client(base_url=live.url, timeout=20) as http:
        body = {"prompt": "x", "n": 2, "stream": stream}
        first: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: first.append(httpx.post(f"{live.url}/v1/completions", json=body, timeout=20))
        )
        thread.start()
        assert engine.wait_until(lambda: len(engine.requests) == 2)
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        never = http.post("/v1/completions", json={**body, "n": 3})
        assert never.status_code == 400
        engine.allow(None)
        thread.join(20)
        assert first[0].status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 200
        assert live.in_flight() == 0


def test_many_requests_at_once_get_their_own_answers(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=30, limits=httpx.Limits(max_connections=20)) as http:

        def ask(seed: int) -> str:
            (choice,) = post(http, "/v1/completions", prompt="x", seed=seed, max_tokens=60)["choices"]
            text: str = choice["text"]
            return text

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(60)))
    assert answers == ["z" * (seed % 10) + TEXT for seed in range(60)]


def test_the_settings_default_is_a_loopback_port_without_a_key() -> None:
    assert ServerSettings().host == "127.0.0.1"
    assert ServerSettings().api_key is None
