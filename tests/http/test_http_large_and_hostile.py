"""Large bodies hold up nobody; every route refuses in one envelope; one event ends a broken stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from frontend_rig import LiveServer, live_server
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import VOCAB, ScriptedEngine, engine_info, says

from tokenspeed.settings.model import ServerSettings

TOKENIZER = piece_tokenizer()
TEXT = "hello world, 日本é the end"
USER = [{"role": "user", "content": "x"}]
ROUTES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 100},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 100},
    "/v1/responses": {"input": "x", "max_output_tokens": 100},
    "/v1/messages": {"messages": USER, "max_tokens": 100},
}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    engine = ScriptedEngine(script=says([*TOKENIZER.encode(TEXT), EOS]), info=engine_info(max_model_len=1024))
    with live_server(engine, settings=ServerSettings(port=0, max_body_mib=24.0)) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


def said(path: str, body: dict[str, Any]) -> tuple[str, str | None]:
    """The text of a whole answer and its stop reason."""
    match path:
        case "/v1/completions":
            return body["choices"][0]["text"], body["choices"][0]["stop_reason"]
        case _:
            return body["choices"][0]["message"]["content"], body["choices"][0]["stop_reason"]


def streamed(text: str) -> tuple[str, str | None, list[str]]:
    """The text of a stream, its stop reason, and its pieces."""
    pieces, reason = [], None
    for line in text.split("\n\n"):
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        (choice,) = json.loads(data)["choices"]
        pieces.append(choice.get("text", choice.get("delta", {}).get("content")) or "")
        reason = choice.get("stop_reason") or reason
    return "".join(pieces), reason, pieces


@pytest.mark.parametrize(("path", "step"), [("/v1/completions", 3), ("/v1/chat/completions", 8)])
def test_every_piece_of_the_text_stops_it_right_before_its_first_occurrence(
    http: httpx.Client, path: str, step: int
) -> None:
    """Pieces of one to six characters, wherever token borders are, streamed and not."""
    pieces = {TEXT[at : at + size] for at in range(0, len(TEXT), step) for size in (1, 3, 6)}
    for stop in sorted(pieces):
        cut = TEXT[: TEXT.index(stop)]
        fields = {**ROUTES[path], "stop": ["ZZZ", stop]}
        assert said(path, http.post(path, json=fields).json()) == (cut, stop)
        text, reason, shown = streamed(http.post(path, json={**fields, "stream": True}).text)
        assert (text, reason) == (cut, stop)
        assert all("�" not in piece for piece in shown)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stop_string_that_never_comes_changes_nothing_not_even_in_wide_characters(
    http: httpx.Client, path: str
) -> None:
    for stop in (["ZZZ"], ["日本ZZ", "é the en!"], ["the end!", "the"[:1] + "Z"]):
        fields = {**ROUTES[path], "stop": stop}
        assert said(path, http.post(path, json=fields).json()) == (TEXT, None)
        assert streamed(http.post(path, json={**fields, "stream": True}).text)[:2] == (TEXT, None)


def test_large_bodies_wait_for_the_pool_while_everything_small_is_answered(live: LiveServer) -> None:
    gate, held = threading.Event(), []
    pool = live.rig.api.prompts.workers.pool
    for _ in range(2):
        entered = threading.Event()
        held.append(pool.submit(lambda entered=entered: (entered.set(), gate.wait(30))))
        assert entered.wait(10)
    answers: list[httpx.Response] = []
    large = {**ROUTES["/v1/completions"], "metadata": "x" * 300_000}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{live.url}/v1/completions", json=large, timeout=60))
    )
    thread.start()
    try:
        assert live.rig.api is not None
        with httpx.Client(base_url=live.url, timeout=20) as http:
            while live.on_loop(lambda: live.rig.api.prompts.workers.state.pending) != 1:
                assert http.get("/health").status_code == 200
            for path, fields in ROUTES.items():
                assert http.post(path, json=fields).status_code == 200
                assert http.post(path, json={**fields, "stream": True}).status_code == 200
            assert http.get("/health").status_code == 200
            assert answers == []
    finally:
        gate.set()
        thread.join(30)
    assert answers[0].status_code == 200
    for future in held:
        future.result(10)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_twenty_megabytes_are_a_clear_400_and_more_than_allowed_a_413(http: httpx.Client, path: str) -> None:
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    for size, status in ((20, 400), (25, 413)):
        text = "x" * (size << 20)
        content: object = text if name != "messages" else [{"role": "user", "content": text}]
        answer = http.post(path, json={**ROUTES[path], name: content})
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 2000
    assert http.get("/health").status_code == 200


RAW = [
    (b'"temperature": NaN', "temperature"),
    (b'"temperature": 1e400', "temperature"),
    (b'"top_p": -Infinity', "top_p"),
    (b'"top_k": 1e400', "top_k"),
    (b'"seed": 36893488147419103232', "seed"),
    (b'"metadata": {"a": "\\ud800"}', "metadata.a"),
    (b'"model": "\\udc00"', "model"),
]


OTHERS: dict[str, dict[str, object]] = {
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 100}},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


RAW_CASES = [
    (path, field, param) for path in (*ROUTES, *OTHERS) for field, param in RAW if param != "seed" or path in ROUTES
]
"""Where it means nothing, an integer of any size is ignored."""


@pytest.mark.parametrize(("path", "field", "param"), RAW_CASES, ids=[f"{param}-{path}" for path, _, param in RAW_CASES])
def test_numbers_and_texts_that_json_cannot_hold_are_400_on_every_route(
    http: httpx.Client, live: LiveServer, path: str, field: bytes, param: str
) -> None:
    before = len(live.engine.requests)
    for stream in (b"", b', "stream": true'):
        body = json.dumps({**ROUTES, **OTHERS}[path]).encode()[:-1] + b", " + field + stream + b"}"
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param
    assert len(live.engine.requests) == before


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 2**31, 2**63, "12", 1.5, True, None])
def test_ids_outside_the_vocabulary_reach_no_engine(http: httpx.Client, live: LiveServer, token: object) -> None:
    fields: list[dict[str, object]] = [
        {"prompt": [1, token]},
        {"stop_token_ids": [token]},
        {"allowed_token_ids": [token]},
        {"logit_bias": {str(token): 1.0}},
    ]
    if token == "12":
        fields.pop()  # keys of logit_bias are texts
    before = len(live.engine.requests)
    for field in fields:
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**ROUTES["/v1/completions"], **field, "stream": stream})
            assert answer.status_code == 400, (field, answer.text)
            assert next(iter(field)) in answer.json()["error"]["param"]
    assert len(live.engine.requests) == before
    assert http.post("/v1/completions", json=ROUTES["/v1/completions"]).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
def test_a_failure_in_mid_stream_is_one_error_event_and_then_the_end(path: str) -> None:
    engine = ScriptedEngine(info=engine_info(max_model_len=1024), credit=3)
    with live_server(engine) as live, httpx.Client(base_url=live.url, timeout=20) as http:
        with http.stream("POST", path, json={**ROUTES[path], "stream": True}) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            first = next(lines)
            live.on_loop(lambda: live.rig.client.close("lost"))
            rest = [first, *lines]
        data = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
        errors = [body for body in data if body.get("error") is not None and body.get("type") != "response.created"]
        errors = [body for body in errors if "response" not in body]
        assert len(errors) == 1
        assert errors == data[-1:]
        assert "lost" in json.dumps(errors)
        assert "data: [DONE]" not in rest
