"""What importing costs, and what the control plane can do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import SRC

ROOMS_WITHOUT_TORCH = (
    "settings.load",
    "settings.schema",
    "plane.ports",
    "plane.table",
    "plane.checks",
    "scheduler.build",
    "control.event_loop",
    "compose.control",
    "wire",
    "telemetry",
    "checkpoint.sources",
    "testing",
    "cli.main",
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=120, check=False
    )


def test_importing_the_package_imports_no_torch() -> None:
    done = run("import sys, tokenspeed; print([m for m in ('torch', 'numpy', 'zmq', 'attrs') if m in sys.modules])")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


@pytest.mark.contract("PT-18", "ER-7")
@pytest.mark.parametrize("module", ROOMS_WITHOUT_TORCH)
def test_a_room_outside_the_device_side_imports_where_torch_cannot(module: str) -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in ("torch", "triton", "xgrammar", "transformers"))
    done = run(f"import sys; {blocked}; import tokenspeed.{module}")
    assert done.returncode == 0, done.stderr


def test_the_package_is_marked_as_typed() -> None:
    assert (SRC / "py.typed").is_file()


def test_the_package_runs_as_a_module() -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    command = [sys.executable, "-m", "tokenspeed", "version"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=60, check=False, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tokenspeed 0.")
