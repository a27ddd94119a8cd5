"""The client goes away, or the engine does: nothing keeps working for nobody, nobody waits for ever."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from frontend_rig import LiveServer, live_server
from scripted_engine import ScriptedEngine, engine_info

from tokenspeed.settings.model import ServerSettings

BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 10_000},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10_000},
}
CASES = [(path, stream) for path in BODIES for stream in (False, True)]
IDS = [f"{path.rsplit('/', 2)[-2]}-{'stream' if stream else 'plain'}" for path, stream in CASES]


@pytest.fixture
def live() -> Iterator[LiveServer]:
    engine = ScriptedEngine(info=engine_info(max_model_len=100_000))
    engine.allow(0)
    with live_server(engine, settings=ServerSettings(port=0, request_timeout_s=60)) as server:
        yield server


def send(live: LiveServer, path: str, *, stream: bool, **fields: object) -> socket.socket:
    """A connection with one whole request sent on it."""
    body = json.dumps({**BODIES[path], "stream": stream, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(head.encode() + body)
    return sock


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        piece = sock.recv(65536)
        assert piece, f"closed before {wanted!r}: {data!r}"
        data += piece
    return data


def settles(live: LiveServer, condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true while the engine goes on; it looks again after every step or message."""
    return live.engine.wait_until(condition)


def all_gone(live: LiveServer) -> None:
    assert settles(live, lambda: live.engine.quiet), "the engine still works"
    assert live.in_flight() == 0
    assert live.on_loop(lambda: live.rig.service.gate.live) == 0
    assert live.rig.metric("frontend_live_sequences") == 0


def still_serves(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=20) as http:
        answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200


@pytest.mark.parametrize(("path", "stream"), CASES, ids=IDS)
def test_a_client_that_leaves_before_the_first_token_aborts_its_request(
    live: LiveServer, path: str, *, stream: bool
) -> None:
    sock = send(live, path, stream=stream, n=2)
    assert settles(live, lambda: len(live.engine.requests) == 2)
    sock.close()
    assert settles(live, lambda: len(live.engine.aborted) == 2)
    live.engine.allow(None)
    all_gone(live)
    assert live.rig.metric("request_success_total", finished_reason="abort") == 2
    still_serves(live)


@pytest.mark.parametrize(("path", "stream"), CASES, ids=IDS)
def test_a_client_that_leaves_while_tokens_come_aborts_its_request(
    live: LiveServer, path: str, *, stream: bool
) -> None:
    live.engine.allow(None)
    sock = send(live, path, stream=stream)
    if stream:
        read_until(sock, b"data: ")
    else:
        assert settles(live, lambda: live.engine.steps > 20)
    sock.close()
    assert settles(live, lambda: len(live.engine.aborted) == 1)
    all_gone(live)
    still_serves(live)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_closes_its_sending_side_counts_as_gone(live: LiveServer, *, stream: bool) -> None:
    sock = send(live, "/v1/completions", stream=stream)
    assert settles(live, lambda: len(live.engine.requests) == 1)
    sock.shutdown(socket.SHUT_WR)
    assert settles(live, lambda: len(live.engine.aborted) == 1)
    sock.close()
    live.engine.allow(None)
    all_gone(live)


def test_two_hundred_abandoned_streams_of_four_choices_leave_nothing_behind(live: LiveServer) -> None:
    live.engine.allow(None)
    for _ in range(50):
        socks = [send(live, "/v1/chat/completions", stream=True, n=4) for _ in range(4)]
        for sock in socks:
            read_until(sock, b"data: ")
            sock.close()
        assert settles(live, lambda: live.engine.quiet)
    assert len(live.engine.requests) == 800
    assert settles(live, lambda: len(live.engine.aborted) == 800)
    all_gone(live)
    assert live.on_loop(lambda: dict(live.rig.client.state.routes)) == {}
    assert live.rig.metric("request_success_total", finished_reason="abort") == 800
    still_serves(live)


def test_a_client_that_never_reads_holds_up_nobody_and_is_given_up() -> None:
    engine = ScriptedEngine(info=engine_info(max_model_len=1_000_000, vocab_size=269))
    with live_server(engine, settings=ServerSettings(port=0, request_timeout_s=2.0)) as live:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = live.url.removeprefix("http://").split(":")
        sock.connect((host, int(port)))
        body = json.dumps({**BODIES["/v1/completions"], "max_tokens": 900_000, "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        assert settles(live, lambda: engine.steps > 100)
        with httpx.Client(base_url=live.url, timeout=20) as http:
            for _ in range(5):
                assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20}).status_code == 200
        assert engine.wait_until(lambda: engine.quiet, 30), "the stalled reader's request still runs"
        all_gone(live)
        sock.close()


def test_the_engines_death_ends_a_stream_with_one_error_event(live: LiveServer) -> None:
    live.engine.allow(2)
    with (
        httpx.Client(base_url=live.url, timeout=20) as http,
        http.stream("POST", "/v1/chat/completions", json={**BODIES["/v1/chat/completions"], "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        live.engine.die("killed by the test")
        rest = [line for line in lines if line]
    assert "[DONE]" not in rest[-1]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "service_unavailable_error"
    assert "killed by the test" in error["message"]
    assert all('"error"' not in line for line in rest[:-1])


def test_the_engines_death_fails_waiting_requests_with_503_and_health_says_so(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=20) as http:
        assert http.get("/health").status_code == 200
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(
                target=lambda path=path, stream=stream: answers.append(
                    httpx.post(f"{live.url}{path}", json={**BODIES[path], "stream": stream}, timeout=20)
                )
            )
            for path, stream in CASES
        ]
        for thread in threads:
            thread.start()
        assert settles(live, lambda: len(live.engine.requests) == 4)
        live.engine.die()
        for thread in threads:
            thread.join(20)
        assert [answer.status_code for answer in answers] == [503] * 4
        assert all(answer.json()["error"]["code"] == "unavailable" for answer in answers)
        health = http.get("/health")
        assert health.status_code == 503
        assert "gone" in health.json()["error"]["message"]
        assert http.get("/ping").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize(("path", "stream"), CASES, ids=IDS)
def test_a_request_over_the_time_limit_gets_408(path: str, *, stream: bool) -> None:
    engine = ScriptedEngine()
    engine.allow(0)
    with live_server(engine, settings=ServerSettings(port=0, request_timeout_s=0.2)) as live:
        answer = httpx.post(f"{live.url}{path}", json={**BODIES[path], "stream": stream}, timeout=20)
        assert answer.status_code == 408
        assert "0.2 s" in answer.json()["error"]["message"]
        assert settles(live, lambda: len(engine.aborted) == 1)


def test_a_stream_over_the_time_limit_ends_with_an_error_event() -> None:
    engine = ScriptedEngine()
    engine.allow(3)
    with live_server(engine, settings=ServerSettings(port=0, request_timeout_s=0.5)) as live:
        answer = httpx.post(
            f"{live.url}/v1/completions", json={**BODIES["/v1/completions"], "stream": True}, timeout=20
        )
        assert answer.status_code == 200
        events = [part for part in answer.text.split("\n\n") if part]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert "[DONE]" not in answer.text


# ---- identity ----


def test_two_streams_with_the_same_request_id_do_not_know_of_each_other(live: LiveServer) -> None:
    headers = {"X-Request-Id": "same", "content-type": "application/json"}
    answers: list[httpx.Response] = []

    def ask(seed: int) -> None:
        body = {"prompt": "x", "max_tokens": 8, "stream": True, "seed": seed, "request_id": "same"}
        answers.append(httpx.post(f"{live.url}/v1/completions", json=body, headers=headers, timeout=20))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    assert settles(live, lambda: len(live.engine.requests) == 4)
    live.engine.allow(None)
    for thread in threads:
        thread.join(20)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(answer.headers["x-request-id"] == "same" for answer in answers)
    assert len({request.rid for request in live.engine.requests}) == 4
    assert len({answer.text for answer in answers}) == 4
    ask(9)  # and once more right after
    assert answers[-1].status_code == 200
    all_gone(live)


@pytest.mark.parametrize("given", ["x" * 10_000, "", "a b", "é"])
def test_an_impossible_request_id_in_a_header_is_refused(live: LiveServer, given: str) -> None:
    live.engine.allow(None)
    headers = {b"X-Request-Id": given.encode()}
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"}, headers=headers, timeout=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Id"
    still_serves(live)
