"""The native step's team under disturbance: several processes, pinned threads, forks, fewer threads than asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed.device.native.library import native_library

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "native_stress.py"
SWITCHES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC")

Process = tuple[int, dict[str, str]]
"""The team that is asked for, and what OpenMP is told."""

PASSIVE = (3, {"OMP_WAIT_POLICY": "PASSIVE"})
ACTIVE = (2, {"OMP_WAIT_POLICY": "ACTIVE"})
ALONE = (4, {"OMP_THREAD_LIMIT": "1"})
FEWER = (8, {"OMP_DYNAMIC": "true"})
MANY = (12, {"OMP_WAIT_POLICY": "PASSIVE"})


def stress(seconds: float, processes: list[Process]) -> list[dict[str, int]]:
    """What each process did, all of them side by side. A wrong bit or a wait for ever ends one with a status."""
    native_library()  # built once, before they start
    base = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(seconds), str(threads), str(seed)],
            env=base | told,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed, (threads, told) in enumerate(processes)
    ]
    found = []
    try:
        for process in started:
            out, errors = process.communicate(timeout=seconds + 150)
            assert process.returncode == 0, errors[-4000:]
            found.append(json.loads(out))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return found


def test_teams_neither_stop_nor_err_under_pins_forks_and_limits() -> None:
    for done in stress(0.5, [PASSIVE, ALONE]):
        assert done["steps"] >= 10
        assert done["forks"] >= 1
        assert done["pins"] > 0


@pytest.mark.slow
def test_teams_neither_stop_nor_err_for_longer() -> None:
    done = stress(60.0, [PASSIVE, ACTIVE, ALONE, FEWER, MANY])
    assert min(each["forks"] for each in done) > 3
