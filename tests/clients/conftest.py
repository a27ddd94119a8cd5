"""One scripted server for all clients, in a process of the engine's own environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

for name, value in (
    ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
    ("HF_HUB_OFFLINE", "1"),
    ("DO_NOT_TRACK", "1"),
    ("LANGSMITH_TRACING", "false"),
    ("NO_PROXY", "127.0.0.1,localhost"),
):
    if "TOKENSPEED_PYTHON" in os.environ:  # their own run; elsewhere this file is only collected
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a server that lives as long as the tests do.

    ``TOKENSPEED_PYTHON`` is the interpreter with the engine; by default the tests' own.
    """
    python = os.environ.get("TOKENSPEED_PYTHON", sys.executable)
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests' / 'support'}"
    with subprocess.Popen(
        [python, str(HERE / "scripted_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), "the server did not start"
        try:
            yield url
        finally:
            process.stdin.close()
            process.wait(30)
