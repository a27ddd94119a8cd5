"""A deployment that nobody asks anything: who its threads are, and that none of them wakes for nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import httpx
import pytest
from idle_threads import ThreadWakes, family_of, named_here, threads_of, wakes

from tokenspeed import Engine
from tokenspeed.compose.offline import SamplingOptions
from tokenspeed.settings.model import (
    Backend,
    CacheSettings,
    DeviceSettings,
    Executor,
    ModelSettings,
    SchedulerSettings,
    Settings,
)

WINDOW_S = 2.2
HEARTBEATS = 3
"""Load reports that a window of that length may hold, at one a second (FW-29)."""
WAKES_EACH = 5
"""Waits that passing on one report may take a thread: for the report, for a lock, for the interpreter."""

SERVE = [sys.executable, "-m", "tokenspeed", "serve", "random:tiny-llama", "--port", "0", "--memory-gib", "0.25"]


@attrs.frozen
class Deployment:
    """Attributes: `processes`, by what they run."""

    url: str
    processes: dict[str, int]


def role(pid: int) -> str:
    found = re.search(r"(rank|frontend)_main", Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"))
    return found.group(1) if found else "launcher"


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    flags = ["--max-num-seqs", "4", "--set", "device.threads=1"]
    with subprocess.Popen([*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as serve:
        try:
            assert serve.stdout is not None
            said = [""]
            while not (found := re.search(r"serving .* at (http://\S+)", said[-1])):
                said.append(serve.stdout.readline())
                assert said[-1], f"it ended:\n{''.join(said)}"
            url = found.group(1)
            body = {"model": "tiny-llama", "prompt": "hi", "max_tokens": 4}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            yield Deployment(url, {role(pid): pid for pid in family_of(serve.pid)})
        finally:
            serve.terminate()
            serve.communicate(timeout=60)


@pytest.mark.contract("PT-1")
def test_a_rank_is_a_process_with_one_main_thread_and_one_forward_thread(deployment: Deployment) -> None:
    assert sorted(deployment.processes) == ["frontend", "launcher", "rank"]
    rank = deployment.processes["rank"]
    threads = list(threads_of(rank))
    names = [thread.name for thread in threads]
    assert [thread.tid for thread in threads].count(rank) == 1
    assert names.count("ts-forward") == 1
    assert {"ts-exec", "ts-write", "ts-load", "ts-wire"} <= set(names)
    others = [thread.name for pid in deployment.processes.values() if pid != rank for thread in threads_of(pid)]
    assert "ts-forward" not in others


def too_often(found: list[ThreadWakes], heartbeat: tuple[str, ...]) -> list[ThreadWakes]:
    """Threads that woke without a reason; those named in `heartbeat` pass on the load report of each second."""
    return [t for t in found if t.name not in heartbeat or t.wakes > HEARTBEATS * WAKES_EACH]


@pytest.mark.contract("PT-8", "RA-7", "FW-29")
def test_no_thread_of_an_idle_deployment_wakes_without_work(deployment: Deployment) -> None:
    pids = list(deployment.processes.values())
    wakes(pids, 0.5)  # what a request left to do is done
    found = wakes(pids, WINDOW_S)
    mains = tuple(next(threads_of(pid)).name for pid in pids)
    assert found, "not even a load report was sent: the count is wrong"
    assert named_here(too_often(found, (*mains, "ts-wire", "ts-hub", "ZMQbg/IO/0"))) == []


GREEDY = SamplingOptions(max_tokens=4, temperature=0.0, ignore_eos=True)
TINY = Settings(
    model=ModelSettings(source="random:tiny-llama"),
    device=DeviceSettings(kv_pool_tokens=1024, threads=1),
    scheduler=SchedulerSettings(max_num_seqs=4, max_batched_tokens=64, chunk_tokens=64),
)
FORMS = {
    "streams": TINY,
    "futures with a host tier": attrs.evolve(
        TINY,
        device=attrs.evolve(TINY.device, executor=Executor.FUTURES),
        cache=CacheSettings(host_gib=0.01),
    ),
    "simulated": attrs.evolve(TINY, device=attrs.evolve(TINY.device, backend=Backend.SIMULATED)),
}


@pytest.mark.contract("PT-8", "RA-7")
@pytest.mark.parametrize("form", FORMS)
def test_no_thread_of_an_idle_engine_in_this_process_wakes_without_work(form: str) -> None:
    others = frozenset(thread.tid for thread in threads_of(os.getpid()))
    with Engine(FORMS[form]) as engine:
        engine.generate("hello", GREEDY)
        wakes([os.getpid()], 0.3, apart_from=others)
        found = wakes([os.getpid()], WINDOW_S, apart_from=others)
        python = named_here(found)
    silent = [name for name in python if name.split(" (")[0] not in ("ts-control", "ts-wire", "ts-frontend")]
    assert silent == []
    assert [t for t in found if t.wakes > HEARTBEATS * WAKES_EACH] == []
