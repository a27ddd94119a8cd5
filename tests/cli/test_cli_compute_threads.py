"""What the commands' compute threads do between steps; the OpenMP runtime says itself what it was told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tokenspeed import Engine
from tokenspeed.device.machine import wait_policy_hint
from tokenspeed.settings.model import DeviceSettings, ModelSettings, Settings

SWITCHES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(("asked", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_a_commands_threads_sleep_between_steps_unless_the_user_says_otherwise(asked: str | None, found: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    environ |= {"OMP_DISPLAY_ENV": "TRUE"} | ({} if asked is None else {"OMP_WAIT_POLICY": asked})
    done = subprocess.run(
        [sys.executable, "-m", "tokenspeed", "generate", "--set", "model.source=/there/is/none", "x"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "/there/is/none" in done.stderr
    assert f"OMP_WAIT_POLICY = '{found}'" in done.stderr


def test_an_engine_in_somebodys_process_leaves_its_environment_alone() -> None:
    before = dict(os.environ)
    settings = Settings(
        model=ModelSettings(source="random:tiny-llama"), device=DeviceSettings(threads=2, kv_pool_tokens=512)
    )
    with Engine(settings):
        pass
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, True),
        ({"OMP_WAIT_POLICY": "active"}, False),
        ({"OMP_WAIT_POLICY": "passive"}, False),
        ({"GOMP_SPINCOUNT": "0"}, False),
    ],
)
def test_who_left_open_what_threads_do_is_told_how_to_say_it(environ: dict[str, str], told: bool) -> None:
    assert ("OMP_WAIT_POLICY=PASSIVE" in (wait_policy_hint(environ, threads=2) or "")) == told
    assert wait_policy_hint(environ, threads=1) is None
