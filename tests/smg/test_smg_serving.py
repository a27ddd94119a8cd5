"""What clients of the real gateway get from our engine."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from smg_rig import MODEL, Lane, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "say hello"}]}
LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 1900, "ignore_eos": True}


def ask(lane: Lane, path: str, **body: Any) -> Any:
    answer = lane.gateway.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(lane: Lane, path: str, **body: Any) -> list[Any]:
    """The events of a streamed answer; the end mark must be there."""
    with lane.gateway.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def idle(lane: Lane) -> bool:
    """The engine reports no requests and no block in use."""
    (load,) = lane.gateway.loads() or [{"num_running_reqs": -1}]
    return load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0 and load["token_usage"] == 0.0


@contextlib.contextmanager
def paused(lane: Lane) -> Iterator[None]:
    """What runs stays as it is, so that it can be looked at."""
    lane.gateway.operate("pause_generation", mode="keep")
    try:
        yield
    finally:
        lane.gateway.operate("continue_generation")


@pytest.mark.contract("FW-1", "FW-2", "FW-3", "FW-7")
def test_a_chat_is_the_same_streamed_and_whole(lane: Lane) -> None:
    body = {**CHAT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = ask(lane, "/v1/chat/completions", **body)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 12
    chunks = events(lane, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert deltas[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_a_completion_is_the_same_streamed_and_whole_and_twice(lane: Lane) -> None:
    body = {"prompt": "the quick brown fox", "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    whole = ask(lane, "/v1/completions", **body)
    again = ask(lane, "/v1/completions", **body)
    text = whole["choices"][0]["text"]
    assert again["choices"][0]["text"] == text
    assert "".join(chunk["choices"][0]["text"] for chunk in events(lane, "/v1/completions", **body)) == text
    assert whole["usage"] == {**whole["usage"], "prompt_tokens": 19, "completion_tokens": 10}
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16  # a whole block of the prompt was there


def test_each_of_several_choices_ends_once_and_a_seed_repeats_them(lane: Lane) -> None:
    body = {**CHAT, "n": 3, "max_tokens": 8, "temperature": 1.5, "seed": 7}
    whole = ask(lane, "/v1/chat/completions", **body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in whole["choices"]} <= {"stop", "length"}
    ends = [
        choice["index"]
        for chunk in events(lane, "/v1/chat/completions", **body)
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(ends) == [0, 1, 2]
    one = {**CHAT, "max_tokens": 8, "temperature": 1.5, "seed": 7}
    first, second = (ask(lane, "/v1/chat/completions", **one)["choices"][0]["message"]["content"] for _ in range(2))
    assert first == second


@pytest.mark.contract("OL-4")
def test_alternatives_come_with_every_token_the_chosen_one_among_them(lane: Lane) -> None:
    body = {**CHAT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    whole = ask(lane, "/v1/chat/completions", **body)["choices"][0]["logprobs"]["content"]
    assert len(whole) == 6
    for entry in whole:
        assert len(entry["top_logprobs"]) == 3
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0] <= 0.0  # greedy: the likeliest
    streamed = [
        entry
        for chunk in events(lane, "/v1/chat/completions", **body)
        for choice in chunk["choices"]
        for entry in (choice.get("logprobs") or {}).get("content") or ()
    ]
    assert [entry["logprob"] for entry in streamed] == [entry["logprob"] for entry in whole]


@pytest.mark.parametrize(("count", "start"), [(39, 0), (39, 20), (1, 0)])
def test_log_probabilities_of_a_prompt_come_with_its_tokens(lane: Lane, count: int, start: int) -> None:
    ids = list(range(1, count + 1))  # 39: more than one chunk; 1: nothing predicts it
    sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}
    meta = ask(lane, "/generate", **body)["meta_info"]
    values, tokens = zip(*meta["input_token_logprobs"], strict=True)
    assert list(tokens) == ids[start:]
    assert [value is None for value in values] == [start == 0, *[False] * (count - 1 - start)]
    assert all(value <= 0.0 for value in values if value is not None)


def test_a_stop_token_ends_an_answer(lane: Lane) -> None:
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    stopped = ask(lane, "/v1/completions", **body, stop_token_ids=list(range(128)))
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 40


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "hello", "stop_token_ids": [1 << 20]}, "stop_token_ids"),
        ({"prompt": "hello", "stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_refusal_reaches_the_client_with_its_status_and_its_words(
    lane: Lane, body: dict[str, Any], field: str
) -> None:
    answer = lane.gateway.http.post("/v1/completions", json={"model": MODEL, "max_tokens": 4, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


def test_requests_beyond_the_queue_are_told_to_come_later_and_the_others_end_well(lane: Lane) -> None:
    body = {**LONG, "max_tokens": 200, "temperature": 0}
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: lane.gateway.http.post("/v1/completions", json=body), range(24)))
    assert {answer.status_code for answer in answers} == {200, 429}, {a.text[:300] for a in answers}
    texts = {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}
    assert len(texts) == 1
    assert all("scheduler.max_waiting" in answer.text for answer in answers if answer.status_code == 429)
    until(lambda: idle(lane), "an idle engine")


@pytest.mark.contract("FW-28")
def test_a_stream_whose_reader_leaves_is_ended_and_its_blocks_are_given_back(lane: Lane) -> None:
    with lane.gateway.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        rid = json.loads(next(line for line in answer.iter_lines() if line.startswith("data: "))[6:])["id"]
    assert ": abort, " in lane.engine.says(f"{rid}: ")
    until(lambda: idle(lane), "an idle engine")


@pytest.mark.contract("FW-22", "FW-24", "FW-28")
def test_load_is_shown_while_a_request_is_held_by_a_pause_and_goes_when_its_reader_leaves(lane: Lane) -> None:
    until(lambda: idle(lane), "an idle engine")
    with lane.gateway.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the answer is closed with it
        rid = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["id"]
        with paused(lane):
            until(lambda: lane.gateway.loads()[0]["num_running_reqs"] == 1, "one running request")
            assert lane.gateway.loads()[0]["token_usage"] > 0.0
            answer.close()
            assert ": abort, " in lane.engine.says(f"{rid}: ")
            until(lambda: idle(lane), "an idle engine")


def test_a_whole_answer_whose_reader_leaves_is_ended_too(lane: Lane) -> None:
    aborts = lane.engine.text.count(": abort, ")
    where = httpx.URL(lane.gateway.url)
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection((where.host, where.port or 80)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: sum(lane.gateway.in_flight()), "the request at the worker")
    until(lambda: lane.engine.text.count(": abort, ") == aborts + 1, "the abort")
    until(lambda: idle(lane), "an idle engine")
    assert (
        ask(lane, "/v1/completions", prompt="again", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    )


@pytest.mark.contract("FW-16", "FW-18")
def test_the_prefix_cache_is_flushed_through_the_gateway(lane: Lane) -> None:
    body = {"prompt": "a prompt of more than one block of sixteen tokens", "max_tokens": 2, "temperature": 0}
    ask(lane, "/v1/completions", **body)
    assert ask(lane, "/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    answer = lane.gateway.http.post("/flush_cache").json()
    assert (answer["status"], answer["workers_flushed"]) == ("success", 1)
    assert ask(lane, "/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
