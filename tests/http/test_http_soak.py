"""The soak of `benchmarks/http_soak.py`, over a scripted engine; and that it notices what is wrong."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from frontend_rig import live_server
from scripted_engine import ScriptedEngine, engine_info, random_letters

from tokenspeed.plane.messages import GenerateRequest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "http_soak.py"


@pytest.fixture(scope="module")
def http_soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("http_soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["http_soak"] = module
    spec.loader.exec_module(module)
    return module


def test_many_requests_with_leaving_clients_are_right_and_leave_nothing_behind(http_soak: ModuleType) -> None:
    engine = ScriptedEngine(info=engine_info(max_model_len=1024, max_waiting=64), pace_s=0.002)
    with live_server(engine) as live:
        options = http_soak.SoakOptions(url=live.url, requests=120)
        report = asyncio.run(http_soak.soak(options))
        assert report.faults == []
        assert report.leftovers == {}
        assert report.complete + report.left == 120
        assert report.left > 30
        assert report.complete > 50
        assert report.near_ties == 0
        assert "left over at rest            nothing" in report.table(options)
        assert live.rig.metric("request_success_total", finished_reason="abort") > 10
        assert engine.quiet
        assert live.rig.client.state.routes == {}


def test_the_soak_notices_a_wrong_token_a_request_that_stays_and_a_refusal(http_soak: ModuleType) -> None:
    wrong = iter(range(1000))

    def drifting(request: GenerateRequest) -> list[int]:
        ids = list(random_letters(request))
        if next(wrong) > 40:
            ids[5] = 33
        return ids

    engine = ScriptedEngine(info=engine_info(max_model_len=1024), script=drifting)
    with live_server(engine) as live:
        options = http_soak.SoakOptions(url=live.url, requests=40, concurrency=4, leaving=0.0, prompts=4)
        report = asyncio.run(http_soak.soak(options))
        assert report.faults
        assert not report.passed
        assert "instead of" in report.faults[0]
    held = http_soak._held('tokenspeed:num_requests_running{engine="0"} 2.0\ntokenspeed:prompt_tokens_total 5.0\n')
    assert held == {"num_requests_running": 2.0}
