"""Control routes of a server over several engines: each is told on its own, all are answered for as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import attrs
import httpx
import pytest
from frontend_rig import frontend
from scripted_engine import engine_info

from tokenspeed.frontend.engine_client import connect_client
from tokenspeed.frontend.http.app import build_app
from tokenspeed.frontend.ports import SteadyClock
from tokenspeed.plane.messages import ControlReply, EngineInfo, FrontendMessage
from tokenspeed.settings.model import ServerSettings
from tokenspeed.telemetry.meters import load_gauges
from tokenspeed.telemetry.registry import new_registry

pytestmark = pytest.mark.anyio
KEY = {"authorization": "Bearer admin"}


@attrs.define(eq=False)
class HandEngine:
    """An `EngineLink` whose other end is the test."""

    info: EngineInfo
    told: list[FrontendMessage] = attrs.field(factory=list)
    listener: Callable[[object], None] = print
    came: asyncio.Event = attrs.field(factory=asyncio.Event)

    def send(self, message: FrontendMessage) -> None:
        self.told.append(message)
        self.came.set()

    def subscribe(self, listener: Callable[[object], None]) -> None:
        self.listener = listener

    def close(self) -> None: ...

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.told) < count:
                self.came.clear()
                await self.came.wait()

    def answer(self, at: int, refusal: str = "") -> None:
        reply = ControlReply(call_id=self.told[at].call_id, success=not refusal, message=refusal)  # type: ignore[union-attr]
        self.listener(reply)


@attrs.frozen
class Pair:
    first: HandEngine
    second: HandEngine
    http: httpx.AsyncClient


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    engines = [HandEngine(attrs.evolve(engine_info(), engine_index=at)) for at in range(2)]
    async with frontend(settings=ServerSettings(port=0, admin_key="admin")) as rig:
        clients = tuple(
            connect_client(
                engine,
                clock=SteadyClock(),
                meter=load_gauges(new_registry("scripted", process=False), engine.info),
                rid_prefix="t",
            )
            for engine in engines
        )
        api = attrs.evolve(rig.api, service=attrs.evolve(rig.service, engines=clients))
        transport = httpx.ASGITransport(build_app(api, clock=SteadyClock()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=KEY) as http:
            yield Pair(*engines, http)
        for client in clients:
            client.close()


@pytest.mark.contract("FW-20")
async def test_every_engine_is_told_weight_operations_in_one_order_however_far_behind_another_is(pair: Pair) -> None:
    versions = [f"v{at}" for at in range(5)]
    asked = []
    for at, version in enumerate(versions):
        asked.append(asyncio.create_task(pair.http.post("/update_weight_version", json={"new_version": version})))
        await pair.first.until(at + 1)
        await pair.second.until(at + 1)
        pair.first.answer(at)  # the second has answered nothing yet
    flush = asyncio.create_task(pair.http.post("/flush_cache"))
    await pair.second.until(6)
    for engine in (pair.first, pair.second):
        assert [getattr(op, "version", "flush") for op in engine.told] == [*versions, "flush"]
    pair.first.answer(5)
    assert not any(task.done() for task in (*asked, flush))
    for at in range(6):
        pair.second.answer(at)
    assert [answer.status_code for answer in await asyncio.gather(*asked, flush)] == [200] * 6


@pytest.mark.contract("FW-21")
async def test_one_answer_speaks_for_all_engines_and_names_those_that_refused(pair: Pair) -> None:
    for refusal in ("", "requests still hold cache blocks"):
        at = len(pair.first.told)
        asked = asyncio.create_task(pair.http.post("/flush_cache"))
        for engine in (pair.first, pair.second):
            await engine.until(at + 1)
        pair.second.answer(at, refusal)
        pair.first.answer(at)
        answer = await asked
        assert (answer.status_code, answer.json()["success"]) == ((400, False) if refusal else (200, True))
        assert answer.json()["message"] == (f"engine 1: {refusal}" if refusal else "")
