"""The asyncio end of an engine's link."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import pytest
from scripted_engine import ScriptedEngine, engine_info, says

from tokenspeed.errors import EngineDead
from tokenspeed.frontend.engine_client import EngineClient, Inbox, connect_client
from tokenspeed.frontend.ports import QuietMeter
from tokenspeed.plane.messages import (
    AbortRequest,
    ControlOp,
    ControlReply,
    Finish,
    FlushCacheOp,
    GenerateRequest,
    PauseMode,
    PauseOp,
    ResumeOp,
    SamplingParams,
    UnsupportedOp,
    frozen_tokens,
)
from tokenspeed.plane.operations import ReleaseMemoryOp, ResumeMemoryOp
from tokenspeed.testing import HandClock

pytestmark = pytest.mark.anyio

Make: TypeAlias = Callable[..., ControlOp]


def client_of(engine: ScriptedEngine, clock: HandClock | None = None) -> EngineClient:
    return connect_client(engine, clock=clock or HandClock(), meter=QuietMeter(), rid_prefix="c")


def submit(client: EngineClient, count: int = 1, *, max_new: int = 3) -> Inbox:
    return client.submit(
        [
            GenerateRequest(rid=rid, input_ids=frozen_tokens([1, 2]), sampling=SamplingParams(max_new_tokens=max_new))
            for rid in client.new_rids(count)
        ]
    )


async def test_output_goes_to_the_inbox_of_its_request_and_the_route_ends_with_it() -> None:
    engine = ScriptedEngine(script=says([7, 8, 9]))
    client = client_of(engine)
    one, two = submit(client), submit(client, 2, max_new=1)
    engine.step()
    assert {place: entry.ids for place, entry in (await one.take()).items()} == {0: [7]}
    assert {place: entry.finish for place, entry in (await two.take()).items()} == {0: Finish.LENGTH, 1: Finish.LENGTH}
    assert client.in_flight == 1
    engine.step()
    engine.step()
    taken = await one.take()
    assert taken[0].ids == [8, 9]
    assert taken[0].finish is Finish.LENGTH
    assert client.in_flight == 0


async def test_a_consumer_that_does_not_look_gets_everything_in_one_piece_later() -> None:
    engine = ScriptedEngine(script=says(list(range(10, 60))))
    client = client_of(engine)
    inbox = submit(client, max_new=50)
    for _ in range(50):
        engine.step()
    taken = await inbox.take()
    assert taken[0].ids == list(range(10, 60))
    assert len(taken) == 1


async def test_what_collects_for_a_slow_consumer_leaves_the_engines_own_lists_alone() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    inbox = submit(client)
    shared: list[list[int]] = [[7]]  # an engine in this process hands over rows that it keeps
    for _ in range(2):
        batch = engine._blank()._replace(
            rids=list(inbox.rids),
            **dict.fromkeys(("output_ids", "logprobs", "top_logprobs"), shared),
            **{key: [[]] for key in ("prompt_logprobs", "prompt_top_logprobs")},
            **{key: [0] for key in ("finished", "prompt_tokens", "completion_tokens", "cached_tokens", "status")},
            messages=[""],
        )
        engine.emit(batch)
    entry = (await inbox.take())[0]
    assert (entry.ids, entry.logprobs, entry.top_logprobs) == ([7, 7], [7, 7], [7, 7])
    assert shared == [[7]]


async def test_request_ids_are_never_used_twice_and_carry_the_clients_prefix() -> None:
    client = client_of(ScriptedEngine())
    rids = client.new_rids(3) + client.new_rids(2)
    assert len(set(rids)) == 5
    assert all(rid.startswith("c-") for rid in rids)


async def test_aborting_tells_the_engine_once_and_delivers_nothing_more() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    inbox = submit(client, 2)
    client.abort(inbox.rids[:1])
    client.abort(inbox.rids[:1])
    assert [m for m in engine.received if isinstance(m, AbortRequest)] == [AbortRequest(rids=inbox.rids[:1])]
    engine.step()
    assert list(await inbox.take()) == [1]


async def test_output_for_an_unknown_request_is_ignored() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    inbox = submit(client)
    client.abort(inbox.rids)
    engine.inbox = [m for m in engine.inbox if not isinstance(m, AbortRequest)]  # the abort is still on its way
    engine.step()
    other = submit(client)
    engine.step()
    assert list(await other.take()) == [0]


async def test_when_the_engine_dies_every_waiter_fails_at_once_and_new_requests_are_refused() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    inboxes = [submit(client) for _ in range(3)]
    waiters = [asyncio.create_task(inbox.take()) for inbox in inboxes]
    call = asyncio.create_task(client.call(lambda i: FlushCacheOp(call_id=i), timeout_s=60))
    await asyncio.sleep(0)
    engine.die("boom")
    outcomes = await asyncio.wait_for(asyncio.gather(*waiters, call, return_exceptions=True), 5)
    assert [str(outcome) for outcome in outcomes] == ["boom"] * 4
    assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
    with pytest.raises(EngineDead, match="boom"):
        submit(client)
    assert not client.alive
    assert client.in_flight == 0


async def test_control_calls_get_their_own_answers_whatever_the_order() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    flush = asyncio.create_task(client.call(lambda i: FlushCacheOp(call_id=i), timeout_s=5))
    other = asyncio.create_task(client.call(lambda i: UnsupportedOp(call_id=i, method="nope"), timeout_s=5))
    await asyncio.sleep(0)
    engine.inbox.reverse()
    engine.step()
    assert (await flush).success
    assert not (await other).success
    assert client.state.calls == {}


async def test_a_control_call_without_an_answer_times_out_and_is_forgotten() -> None:
    client = client_of(ScriptedEngine())
    with pytest.raises(TimeoutError):
        await client.call(lambda i: FlushCacheOp(call_id=i), timeout_s=0.01)
    assert client.state.calls == {}


@pytest.mark.contract("FW-14", "FW-26", "FW-27")
async def test_the_latest_load_report_is_kept_with_or_without_rows() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    await asyncio.sleep(0)
    assert client.load is not None
    submit(client, 2, max_new=1)
    engine.step()
    await asyncio.sleep(0)
    assert client.load.running == 0
    submit(client, 2, max_new=5)
    engine.step()
    await asyncio.sleep(0)
    assert client.load.running == 2


async def test_an_engine_with_work_and_no_progress_is_in_trouble_an_idle_one_is_not() -> None:
    engine, clock = ScriptedEngine(), HandClock()
    client = client_of(engine, clock)
    await asyncio.sleep(0)
    clock.advance(1000)
    assert client.trouble(stall_s=60) == ""
    submit(client)
    clock.advance(59)
    assert client.trouble(stall_s=60) == ""
    clock.advance(2)
    assert "no progress for 61 s" in client.trouble(stall_s=60)
    engine.step()
    await asyncio.sleep(0)
    assert client.trouble(stall_s=60) == ""
    engine.die()
    await asyncio.sleep(0)
    assert "gone" in client.trouble(stall_s=60)


@pytest.mark.parametrize(
    ("hold", "more", "go_on"),
    [
        (partial(PauseOp, mode=PauseMode.KEEP), (), ResumeOp),
        (ReleaseMemoryOp, (partial(ResumeMemoryOp, tags=("weights",)),), ResumeMemoryOp),
        (partial(ReleaseMemoryOp, tags=("kv_cache",)), (), partial(ResumeMemoryOp, tags=("kv_cache",))),
    ],
)
async def test_requests_that_wait_because_the_engine_was_told_to_hold_them_are_no_trouble(
    hold: Make, more: Sequence[Make], go_on: Make
) -> None:
    engine, clock = ScriptedEngine(), HandClock()
    client = client_of(engine, clock)

    async def call(make: Make, *, success: bool = True) -> None:
        waiting = asyncio.create_task(client.call(lambda call_id: make(call_id=call_id), timeout_s=10))
        await asyncio.sleep(0)
        engine.emit(ControlReply(call_id=client.state.called, success=success))
        await waiting

    submit(client)
    await call(hold, success=False)
    clock.advance(61)
    assert client.trouble(stall_s=60) != ""
    await call(hold)
    clock.advance(1000)
    assert client.trouble(stall_s=60) == ""
    for operation in more:  # some of the memory is back, not all
        await call(operation)
        clock.advance(1000)
        assert client.trouble(stall_s=60) == ""
    await call(go_on)
    clock.advance(59)
    assert client.trouble(stall_s=60) == ""
    clock.advance(2)
    assert "no progress for 61 s" in client.trouble(stall_s=60)


async def test_a_report_that_repeats_itself_is_no_progress() -> None:
    engine, clock = ScriptedEngine(), HandClock()
    client = client_of(engine, clock)
    submit(client, max_new=100)
    engine.step()
    engine.beat()
    await asyncio.sleep(0)
    clock.advance(61)
    engine.beat()
    await asyncio.sleep(0)
    assert client.trouble(stall_s=60) != ""


async def test_events_from_a_wire_thread_arrive_in_order() -> None:
    engine = ScriptedEngine(info=engine_info(max_model_len=1024), script=says(list(range(200))))
    client = client_of(engine)
    inbox = submit(client, max_new=200)
    thread = threading.Thread(target=lambda: [engine.step() for _ in range(200)])
    thread.start()
    got: list[int] = []
    while len(got) < 200:
        for entry in (await asyncio.wait_for(inbox.take(), 10)).values():
            got += entry.ids
    thread.join(10)
    assert got == list(range(200))


async def test_an_event_after_the_loop_closed_is_dropped() -> None:
    engine = ScriptedEngine()
    loop = asyncio.new_event_loop()
    client = EngineClient(link=engine, loop=loop, clock=HandClock(), meter=QuietMeter(), rid_prefix="x")
    engine.subscribe(client.receive)
    loop.close()
    engine.die()
