"""`tokenspeed serve --gateway smg`: both are started, watched and stopped as one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from smg_rig import MODEL, START_S, Process, running, until

LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def deployment(scratch: Path) -> Iterator[tuple[Process, str]]:
    command = [sys.executable, "-m", "tokenspeed", "serve", f"random:{MODEL}", "--gateway", "smg", "--port", "0"]
    command += ["--threads", "1", "--memory-gib", "0.25", "--max-num-seqs", "4", "--shutdown-timeout", "20"]
    with running([*command, "--api-key", "secret"], scratch / "deployment.log") as process:
        yield process, process.says(f"serving {MODEL} at ", within_s=START_S).rpartition(" ")[2]


def gateways(launcher: int) -> list[int]:
    """Process ids of gateways below `launcher`."""
    starters = [pid for pid in children(launcher) if b"gateway_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [pid for starter in starters for pid in children(starter)]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(one) for task in tasks.iterdir() for one in (task / "children").read_text().split()]


@pytest.mark.contract("SS-1", "SS-12")
def test_sigterm_lets_what_runs_end_and_leaves_no_process_behind(tmp_path: Path) -> None:
    with deployment(tmp_path) as (process, url):
        (pid,) = gateways(process.process.pid)
        with httpx.Client(base_url=url, timeout=60.0, headers={"authorization": "Bearer secret"}) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
            assert http.post("/v1/completions", json=LONG, headers={"authorization": "Bearer x"}).status_code == 401
            with http.stream("POST", "/v1/completions", json=LONG) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.process.send_signal(signal.SIGTERM)
                last = [line for line in lines if line]
        assert last[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in last[-3:])
        assert process.end() == 0, process.text
        until(lambda: not Path(f"/proc/{pid}").exists(), "the gateway's end")


@pytest.mark.contract("SS-8")
def test_the_end_of_the_gateway_ends_the_deployment_with_an_error(tmp_path: Path) -> None:
    with deployment(tmp_path) as (process, _):
        (pid,) = gateways(process.process.pid)
        os.kill(pid, signal.SIGKILL)
        assert process.process.wait(60.0) == 1
        assert "the gateway ended with status -9" in process.text
