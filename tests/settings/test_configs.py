"""Every file under configs/ is a deployment that this build can resolve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.settings.load import load_settings
from tokenspeed.settings.model import Settings, Transport

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def test_the_deployment_kinds_are_there() -> None:
    assert [path.stem for path in FILES] == [
        "headless",
        "host-tier",
        "kv-events",
        "low-latency",
        "own-model",
        "priority",
        "quickstart",
        "simulated",
        "small-memory",
        "throughput",
    ]
    assert [path for path in CONFIGS.iterdir() if path not in FILES] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_resolves_and_says_what_it_is_for(path: Path) -> None:
    settings = load_settings(path)
    assert settings != Settings(), "a file that changes nothing"
    assert path.read_text().startswith("# ")


def test_the_quickstart_listens_on_this_machine_only() -> None:
    settings = load_settings(CONFIGS / "quickstart.yaml")
    assert settings.server.host == "127.0.0.1"
    assert settings.model.source == Settings().model.source


def test_the_headless_engine_dials_a_handshake_over_zeromq() -> None:
    wire = load_settings(CONFIGS / "headless.yaml").wire
    assert wire.transport is Transport.ZMQ
    assert wire.handshake is not None
