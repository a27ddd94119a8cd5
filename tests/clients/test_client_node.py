"""The clients of Node, run by its own test runner."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parent / "node"
MODULES = NODE / "node_modules"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not on this machine")
@pytest.mark.skipif(not MODULES.is_dir(), reason=f"npm ci was not run in {NODE.name}")
def test_the_clients_of_node_are_served(server_url: str) -> None:
    ran = subprocess.run(
        ["node", "--test", "clients.test.mjs"],
        cwd=NODE,
        env={**os.environ, "SERVER_URL": server_url},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]
