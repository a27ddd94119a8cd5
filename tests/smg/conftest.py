"""One gateway and one engine for every test that needs no other; what happens where the gateway is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from smg_rig import INSTALLED, MISSING, REQUIRED, Lane, engine, gateway

HERE = Path(__file__).parent
HEARD = ("--set", "kv_events.endpoint=tcp://127.0.0.1:*")
"""The gateway takes a registration that names a feed of cache events, though this lane has no use for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.smg)
    if mine and not INSTALLED:
        if REQUIRED:
            raise pytest.UsageError(f"tests/smg: {MISSING}")
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    scratch = tmp_path_factory.mktemp("lane")
    with (
        gateway(scratch, "--enable-rl", "--load-monitor-interval", "1") as front,
        engine(front.worker, scratch / "engine.log", "--max-waiting", "6", *HEARD) as back,
    ):
        front.ready(back)
        yield Lane(gateway=front, engine=back)
