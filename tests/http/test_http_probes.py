"""Probes, loads and what the server tells about itself."""

from __future__ import annotations

import asyncio
import html.parser
from collections.abc import Iterator

import httpx
import pytest
from frontend_rig import LiveServer, frontend, live_server
from scripted_engine import ScriptedEngine

from tokenspeed.frontend.http.info import tokens_of_blocks
from tokenspeed.settings.model import ServerSettings
from tokenspeed.testing import HandClock

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(settings=ServerSettings(port=0)) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/readiness", "/liveness", "/ping", "/health_generate"])
def test_every_probe_is_well_on_a_working_server(http: httpx.Client, path: str) -> None:
    assert http.get(path).json() == {"status": "ok"}


def test_the_generating_probe_generates_one_token_on_an_idle_server(http: httpx.Client, live: LiveServer) -> None:
    before = len(live.engine.requests)
    assert http.get("/health_generate").status_code == 200
    (probe,) = live.engine.requests[before:]
    assert (probe.sampling.max_new_tokens, len(probe.input_ids)) == (1, 1)


async def test_probes_tell_a_stuck_engine_from_a_server_that_answers() -> None:
    clock = HandClock()
    async with frontend(clock=clock, settings=ServerSettings(stall_timeout_s=30)) as rig:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), base_url="http://x") as http:
            waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
            while not rig.engine.requests:  # noqa: ASYNC110 - the request is on its way through the loop
                await asyncio.sleep(0)
            assert (await http.get("/health_generate")).status_code == 200  # something runs: its progress shows it
            assert len(rig.engine.requests) == 1
            clock.advance(31)
            for path in ("/readiness", "/health", "/health_generate"):
                answer = await http.get(path)
                assert answer.status_code == 503
                assert "no progress" in answer.json()["error"]["message"]
            for path in ("/liveness", "/ping"):
                assert (await http.get(path)).status_code == 200
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_the_generating_probe_of_an_idle_engine_that_makes_nothing_gives_up() -> None:
    async with frontend(settings=ServerSettings(stall_timeout_s=0.05)) as rig:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), base_url="http://x") as http:
            answer = await http.get("/health_generate")
            assert answer.status_code == 503
            assert "was not generated within 0.05 s" in answer.json()["error"]["message"]
            assert rig.service.in_flight == 0


def test_loads_are_the_engines_reports(http: httpx.Client, live: LiveServer) -> None:
    assert http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
    assert live.engine.wait_until(lambda: live.engine.quiet)
    assert http.get("/load").json() == {"server_load": 0}
    body = http.get("/v1/loads").json()
    assert body["dp_rank_count"] == len(body["loads"]) == 1
    (load,) = body["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["alive"]) == (0, 0, True)
    assert load["max_total_num_tokens"] == 1024
    assert body["aggregate"]["total_reqs"] == 0
    assert http.get("/get_load").json()["loads"] == body["loads"]


@pytest.mark.contract("FW-33")
def test_a_block_stands_for_its_share_of_the_capacity_and_for_no_number_of_tokens() -> None:
    # A pool of 10 parents that holds 1003 tokens: what a block of 16 tokens says is no measure of it.
    assert [tokens_of_blocks(blocks, 10, 1003) for blocks in (0, 3, 5, 10)] == [0, 300, 501, 1003]
    assert tokens_of_blocks(0, 0, 1003) == 0


def test_the_server_tells_its_settings_without_secrets() -> None:
    with live_server(ScriptedEngine(), settings=ServerSettings(port=0, api_key="s3cret")) as live:
        with httpx.Client(base_url=live.url, timeout=20, headers={"authorization": "Bearer s3cret"}) as http:
            for path in ("/server_info", "/get_server_info"):
                answer = http.get(path)
                assert "s3cret" not in answer.text
                body = answer.json()
                assert body["model_path"] == "scripted"
                assert body["server"]["max_choices"] == 16
                assert "api_key" not in body["server"]
                assert body["internal_states"][0]["max_num_seqs"] == 8
            for path in ("/model_info", "/get_model_info"):
                info = http.get(path).json()
                assert (info["is_generation"], info["max_model_len"], info["has_chat_template"]) == (True, 256, True)


class Links(html.parser.HTMLParser):
    """What a page loads or leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]
        assert tag != "script"


def test_the_page_of_the_api_names_every_route_and_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    page = Links()
    page.feed(answer.text)
    assert page.found == ["openapi.json"]
    for path in http.get("/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in answer.text
    assert "above 0" in answer.text  # a bound
