"""A whole deployment, its engine and its clients as processes that are stopped and killed, on the OpenAI routes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from frontend_rig import sample
from smg_rig import MODEL, START_S, Process, running, until

CLIENT = Path(__file__).parents[1] / "support" / "leaving_client.py"
BUSY = ("num_requests_running", "num_requests_waiting", "kv_pages_active", "frontend_live_sequences")
COMMON = {"model": MODEL, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMMON, "prompt": "hello"},
    "/v1/chat/completions": {**COMMON, "messages": [{"role": "user", "content": "hello"}]},
}
ROUTES = pytest.mark.parametrize("path", BODIES, ids=["completions", "chat"])
LONG = 1900
"""Tokens of an answer that takes some seconds."""


@attrs.frozen(kw_only=True, eq=False)
class Deployment:
    """`rank` is the engine's process id; up to 4 sequences run, 6 wait."""

    url: str
    rank: int
    http: httpx.Client
    log: Process

    def metric(self, name: str, **labels: str) -> float:
        return sample(self.http.get("/metrics").text, name, **labels)

    @property
    def aborted(self) -> int:
        return int(self.metric("request_success_total", finished_reason="abort"))

    def at_rest(self) -> None:
        """Nothing runs, waits or is kept for a request, and the next one is served."""
        until(lambda: not any(self.metric(name) for name in BUSY), "nothing left")
        assert self.text("/v1/completions")

    def answer(self, path: str, **fields: object) -> httpx.Response:
        return self.http.post(path, json={**BODIES[path], "max_tokens": 8, **fields})

    def text(self, path: str, **fields: object) -> str:
        answer = self.answer(path, **fields)
        assert answer.status_code == 200, answer.text
        return text_of(answer.json()["choices"][0])


def text_of(choice: dict[str, Any]) -> str:
    found = choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]
    return str(found or "")


def events_of(body: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in body.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    command = [sys.executable, "-m", "tokenspeed", "serve", f"random:{MODEL}", "--port", "0", "--threads", "1"]
    command += ["--memory-gib", "0.25", "--max-num-seqs", "4", "--max-waiting", "6"]
    with running(
        [*command, "--set", "server.stall_timeout_s=0.5"], tmp_path_factory.mktemp("serve") / "log"
    ) as process:
        url = process.says(f"serving {MODEL} at ", within_s=START_S).rpartition(" ")[2]
        pids = children(process.process.pid)
        (rank,) = [pid for pid in pids if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Deployment(url=url, rank=rank, http=http, log=process)


@contextlib.contextmanager
def client(deployment: Deployment, path: str, *, count: int, **fields: object) -> Iterator[subprocess.Popen[str]]:
    """A client that has sent `count` requests and has read two events of each, if they are streams."""
    url = httpx.URL(deployment.url)
    body = {**BODIES[path], "max_tokens": LONG, **fields}
    told = {"host": url.host, "port": url.port, "path": path, "body": body, "count": count}
    told["events"] = 2 if body.get("stream") else 0
    with subprocess.Popen(
        [sys.executable, str(CLIENT), json.dumps(told)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@ROUTES
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("how", ["killed", "stopped and killed"])
def test_what_a_killed_client_asked_for_is_aborted_with_all_its_choices(
    deployment: Deployment, path: str, stream: bool, how: str
) -> None:
    before = deployment.aborted
    with client(deployment, path, count=2, n=3, stream=stream) as leaving:
        until(lambda: deployment.metric("frontend_live_sequences") == 6, "two requests of three choices")
        if how == "stopped and killed":
            leaving.send_signal(signal.SIGSTOP)
        leaving.kill()
        until(lambda: deployment.aborted == before + 6, "six aborts")
    deployment.at_rest()


@ROUTES
def test_a_client_that_stands_still_holds_up_nobody_and_gets_everything_later(
    deployment: Deployment, path: str
) -> None:
    alone, short = deployment.text(path, max_tokens=300), deployment.text(path)
    with client(deployment, path, count=1, stream=True, max_tokens=300) as slow:
        slow.send_signal(signal.SIGSTOP)
        assert deployment.text(path) == short
        slow.send_signal(signal.SIGCONT)
        (heard,) = json.loads(slow.communicate(timeout=60)[0])
    choices = [event["choices"][0] for event in events_of(heard)]
    assert "".join(text_of(choice) for choice in choices) == alone
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    deployment.at_rest()


@ROUTES
def test_an_engine_that_stands_still_is_told_apart_and_goes_on_where_it_was(deployment: Deployment, path: str) -> None:
    alone = {length: deployment.text(path, max_tokens=length) for length in (8, 400)}
    before, answers = deployment.aborted, list[httpx.Response]()

    def ask() -> None:  # two at once under one name
        with httpx.Client(base_url=deployment.url, timeout=60, headers={"X-Request-Id": "same"}) as own:
            answers.append(own.post(path, json={**BODIES[path], "max_tokens": 8, "request_id": "same"}))

    body = {**BODIES[path], "max_tokens": 400, "stream": True, "n": 4}
    with deployment.http.stream("POST", path, json=body) as streamed, contextlib.ExitStack() as late:
        lines = streamed.iter_lines()
        heard = [next(lines)]
        with stopped(deployment.rank), httpx.Client(base_url=deployment.url, timeout=10) as other:
            asking = [threading.Thread(target=ask) for _ in range(2)]
            for thread in asking:
                thread.start()
                late.callback(thread.join, 60)
            with client(deployment, path, count=1, n=2) as leaving:
                until(lambda: deployment.metric("frontend_live_sequences") == 8, "eight sequences")
                assert other.post(path, json={**BODIES[path], "n": 3}).status_code == 429  # all of it or nothing
                assert deployment.metric("frontend_live_sequences") == 8
                until(lambda: other.get("/health").status_code == 503, "an engine without progress")
                assert "no progress" in other.get("/health").text
                assert other.get("/ping").status_code == 200
                leaving.kill()
                until(lambda: deployment.metric("frontend_live_sequences") == 6, "the end of who left")
        heard += list(lines)
    assert deployment.http.get("/health").status_code == 200
    assert [text_of(answer.json()["choices"][0]) for answer in answers] == [alone[8]] * 2
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 2
    choices = [choice for event in events_of("\n".join(heard)) for choice in event["choices"]]
    for index in range(4):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(text_of(choice) for choice in mine) == alone[400]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
    assert deployment.aborted == before + 2
    deployment.at_rest()


@pytest.mark.parametrize("name", ["x" * 100_000, "", "one\ntwo"], ids=["100 kB", "empty", "two lines"])
@ROUTES
def test_a_name_that_cannot_be_one_is_refused_and_nothing_else_is(deployment: Deployment, path: str, name: str) -> None:
    answer = deployment.answer(path, request_id=name)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert deployment.answer(path, request_id="one", stream=True).status_code == 200
    deployment.at_rest()


@pytest.mark.contract("SS-5", "SS-8")
def test_an_engine_that_is_killed_ends_every_request_with_an_error_and_the_deployment(deployment: Deployment) -> None:
    """The last test of this module: nothing is left of what it is given."""
    answers = dict[tuple[str, bool], str]()
    reading = {(path, stream): threading.Event() for path in BODIES for stream in (True, False)}

    def ask(path: str, stream: bool) -> None:
        body = {**BODIES[path], "max_tokens": LONG, "stream": stream}
        with httpx.Client(base_url=deployment.url, timeout=60) as own, own.stream("POST", path, json=body) as answer:
            answers[path, stream] = f"{answer.status_code}"
            for line in answer.iter_lines():
                reading[path, stream].set()
                answers[path, stream] += f"\n{line}"

    asking = [threading.Thread(target=ask, args=key) for key in reading]
    for thread in asking:
        thread.start()
    until(lambda: deployment.metric("num_requests_running") == 4, "four requests")
    for (path, stream), read in reading.items():
        assert not stream or read.wait(20.0), path
    os.kill(deployment.rank, signal.SIGKILL)
    for thread in asking:
        thread.join(60)
    for (_, stream), told in answers.items():
        assert told.startswith("200\n" if stream else "503\n"), told
        (error,) = [event["error"] for event in events_of(told) if "error" in event]
        assert error["type"] == "service_unavailable_error"
        assert "[DONE]" not in told
    assert deployment.log.process.wait(30.0) == 1
    assert "was ended by SIGKILL" in deployment.log.text
