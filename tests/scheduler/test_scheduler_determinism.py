"""The same inputs give the same plans: no clock, no randomness, no order of a hash table."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scheduler_traces import soak

import tokenspeed.scheduler

ROOM = Path(tokenspeed.scheduler.__file__).parent
FORBIDDEN = {"time", "datetime", "random", "secrets", "uuid", "threading", "os", "socket", "asyncio", "torch"}


@pytest.mark.contract("SP-3")
@pytest.mark.parametrize("path", sorted(ROOM.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOM)))
def test_the_room_imports_no_clock_no_randomness_and_no_threads(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in FORBIDDEN, f"{path.name}:{node.lineno} imports {name}"
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("hash", "id"), f"{path.name}:{node.lineno}"


@pytest.mark.contract("SP-1")
def test_plans_are_equal_under_different_hash_seeds() -> None:
    script = "from scheduler_traces import soak\nfor seed in range(6): print(soak(seed, steps=150)[0])"
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOM.parent.parent)])
    digests = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        digests.append(done.stdout.split())
    assert len(digests[0]) == 6
    assert digests[0] == digests[1]


@pytest.mark.contract("SP-1")
@pytest.mark.parametrize("seed", [*range(100, 106), 2030])
def test_a_mirror_fed_the_same_trace_plans_the_same(seed: int) -> None:
    _, happened = soak(seed, steps=250, mirrors=2)
    assert happened.rounds > 150
    assert happened.finished


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_long_random_traces_keep_every_rule(block: int) -> None:
    preempted = finished = 0
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        _, happened = soak(seed, steps=400, mirrors=2)
        preempted, finished = preempted + happened.preempted, finished + happened.finished
    assert preempted > 3
    assert finished > 200
