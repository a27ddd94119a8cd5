"""How old a load report may be, and that routing goes by complete sets of ratios."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import attrs
import pytest
from scripted_engine import engine_info

from tokenspeed.frontend.engine_client import EngineClient, connect_client
from tokenspeed.frontend.ports import QuietMeter
from tokenspeed.frontend.routing import EngineView, LeastLoaded, snapshots
from tokenspeed.plane.messages import EngineEvent, EngineInfo, FrontendMessage, LoadReport, OutputBatch
from tokenspeed.testing import HandClock

pytestmark = pytest.mark.anyio

LOAD = LoadReport(running=2, waiting=1, resident_blocks=8, active_blocks=4, total_blocks=16)


@attrs.frozen(eq=False)
class SilentLink:
    """An engine that says only what the test says in its name."""

    info: EngineInfo = attrs.field(factory=engine_info)

    def send(self, message: FrontendMessage) -> None: ...

    def subscribe(self, listener: Callable[[EngineEvent], None]) -> None: ...

    def close(self) -> None: ...


def client_of(clock: HandClock) -> EngineClient:
    return connect_client(SilentLink(), clock=clock, meter=QuietMeter(), rid_prefix="c")


def empty_batch(load: LoadReport) -> OutputBatch:
    columns = ("rids", "output_ids", "finished", "prompt_tokens", "completion_tokens", "cached_tokens", "logprobs")
    more = ("top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "status", "messages")
    return OutputBatch(**{name: [] for name in (*columns, *more)}, load=load)  # type: ignore[arg-type]


async def report(client: EngineClient, load: LoadReport = LOAD) -> None:
    client.receive(empty_batch(load))
    await asyncio.sleep(0)


@pytest.mark.contract("FW-31")
async def test_a_report_is_as_old_as_our_own_clock_says_since_it_came() -> None:
    clock = HandClock()
    client = client_of(clock)
    assert client.load is None
    clock.advance(1000.0)
    await report(client)  # a report carries no time: whatever the engine's clock says does not matter
    clock.advance(2.9)
    assert client.load == LOAD
    clock.advance(0.1)
    assert client.load is None
    await report(client)
    assert client.load == LOAD


@pytest.mark.contract("FW-32")
async def test_a_set_of_reports_is_shown_while_every_one_is_younger_than_three_seconds() -> None:
    clock = HandClock()
    one, two = client_of(clock), client_of(clock)
    await report(one)
    assert snapshots((one, two), (0, 1)) == {}  # one of them has never reported
    await report(two)
    assert snapshots((one, two), (0, 1)) == {0: LOAD, 1: LOAD}
    clock.advance(2.9)
    await report(one)
    assert len(snapshots((one, two), (0, 1))) == 2
    clock.advance(0.1)
    assert snapshots((one, two), (0, 1)) == {}
    await report(two)
    assert len(snapshots((one, two), (0, 1))) == 2


@attrs.frozen(kw_only=True)
class View:
    alive: bool = True
    load: LoadReport | None = None
    in_flight: int = 0


def pick(*views: EngineView) -> int:
    return LeastLoaded().pick(views)


@pytest.mark.contract("FW-32")
def test_an_engine_without_a_report_does_not_look_idle_beside_one_that_reports() -> None:
    busy = View(load=LoadReport(running=5, total_blocks=10), in_flight=1)
    assert pick(View(in_flight=3), busy) == 1  # by what was sent, for lack of a report of each
    assert pick(View(in_flight=3, load=LoadReport(running=3, total_blocks=10)), busy) == 0


@pytest.mark.contract("FW-33")
def test_engines_with_equal_ratios_weigh_the_same_whatever_their_blocks() -> None:
    few = LoadReport(running=2, waiting=2, active_blocks=9, resident_blocks=10, total_blocks=10)
    many = LoadReport(running=2, waiting=2, active_blocks=9000, resident_blocks=9001, total_blocks=10_000)
    assert pick(View(load=few), View(load=many)) == 0  # equal: the first
    assert pick(View(load=many), View(load=few)) == 0
    fuller = attrs.evolve(few, active_blocks=10)
    assert pick(View(load=fuller), View(load=many)) == 1
    assert pick(View(load=many), View(load=fuller)) == 0
