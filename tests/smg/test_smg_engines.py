"""Several engines under one gateway, and engines that die under it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest
from smg_rig import MODEL, START_S, Gateway, Process, engine, gateway, until

LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 1900, "ignore_eos": True}
SHORT = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def rank_of(launcher: Process) -> int:
    """The process id of the rank below `launcher`."""
    tasks = Path(f"/proc/{launcher.process.pid}/task")
    children = [int(one) for task in tasks.iterdir() for one in (task / "children").read_text().split()]
    (rank,) = [pid for pid in children if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return rank


def served(front: Gateway) -> list[str]:
    """The texts of an answer; none if there was none."""
    answer = front.http.post("/v1/completions", json=SHORT)
    return [choice["text"] for choice in answer.json()["choices"]] if answer.status_code == 200 else []


@pytest.mark.contract("FW-34")
def test_requests_spread_over_two_engines_and_each_reports_its_own_load(tmp_path: Path) -> None:
    with (
        gateway(tmp_path, "--load-monitor-interval", "1", "--policy", "round_robin", engines=2) as front,
        engine(front.addresses[0], tmp_path / "first.log") as first,
        engine(front.addresses[1], tmp_path / "second.log") as second,
    ):
        front.ready(first, second)
        until(lambda: [worker["is_healthy"] for worker in front.workers()] == [True, True], "two healthy workers")
        until(lambda: len(front.loads()) == 2, "load reports of both")
        answers: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda: answers.append(front.http.post("/v1/completions", json=LONG)))
            for _ in range(8)
        ]
        for thread in asking:
            thread.start()

        def both() -> bool:
            loads = front.loads()
            return len(loads) == 2 and all(int(str(load["num_running_reqs"])) >= 1 for load in loads)

        until(both, "running requests at both engines")
        for thread in asking:
            thread.join(90.0)
        assert [answer.status_code for answer in answers] == [200] * 8
        until(lambda: all(load["token_usage"] == 0.0 for load in front.loads()), "idle engines")


@pytest.mark.parametrize("way", ["killed", "told to stop"])
def test_requests_of_an_engine_that_goes_fail_at_once_and_the_next_engine_serves(tmp_path: Path, way: str) -> None:
    with gateway(tmp_path) as front:
        with engine(front.worker, tmp_path / "first.log") as first:
            front.ready(first)
            text = served(front)
            with front.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                if way == "killed":
                    os.kill(rank_of(first), signal.SIGKILL)
                else:
                    first.process.send_signal(signal.SIGTERM)
                words = "".join(line for line in lines)
            if way == "killed":
                assert "error" in words
            assert len(text) == 1
            assert first.process.wait(30.0) == (1 if way == "killed" else 0)
        answer = front.http.post("/v1/completions", json=SHORT)
        assert answer.status_code in (500, 502, 503), answer.text
        assert "error" in json.loads(answer.text)
        with engine(front.worker, tmp_path / "second.log") as second:
            front.ready(second)
            assert until(lambda: served(front), "an answer of the new engine", within_s=START_S) == text
