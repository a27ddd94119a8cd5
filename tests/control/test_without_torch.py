"""The control plane of a rank, complete, in a process where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
for name in ("torch", "triton", "xgrammar"):
    sys.modules[name] = None
import rig
engine = rig.hand_rig()
for i in range(12):
    engine.put(rig.request(f"r{i}", 5 + 9 * i, max_new=3 + i))
engine.rounds(50)
assert all(engine.link.finish(f"r{i}") for i in range(12))
assert all(len(engine.link.tokens(f"r{i}")) == 3 + i for i in range(12))
assert engine.loop.scheduler.sizes().held == 0
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "triton"))
assert [name for name in loaded if sys.modules[name] is not None] == [], loaded
print("rounds driven")
"""


@pytest.mark.contract("PT-18", "ER-7", "DP-1")
def test_fifty_rounds_run_where_importing_torch_raises() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "rounds driven"
