"""Validation, the gate, the router and the text workers."""

from __future__ import annotations

import asyncio
import math
import threading

import attrs
import pytest
from scripted_engine import engine_info

from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.frontend.gate import SequenceGate, WhenFull, refusing_gate, waiting_gate
from tokenspeed.frontend.generation import GenerationInput
from tokenspeed.frontend.limits import input_faults
from tokenspeed.frontend.routing import EngineView, LeastLoaded
from tokenspeed.frontend.workers import INLINE_CHARS, text_workers
from tokenspeed.plane.messages import LoadReport, SamplingParams, frozen_tokens

pytestmark = pytest.mark.anyio

GOOD = GenerationInput(prompt_ids=frozen_tokens([1, 2, 3]), sampling=SamplingParams(max_new_tokens=5))


def fields_of(inp: GenerationInput, **changes: object) -> list[str]:
    found = input_faults(attrs.evolve(inp, **changes), engine_info(), max_choices=4)  # type: ignore[arg-type]
    for one in found:
        str(one).encode()
        assert one.value
        assert one.allowed
    return [one.field for one in found]


def test_a_good_input_has_no_fault() -> None:
    assert fields_of(GOOD) == []
    assert fields_of(GOOD, n=4, logprobs=20, prompt_logprobs=0, stop=("a",) * 16, timeout_s=0.5) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_ids": frozen_tokens([])}, "prompt"),
        ({"prompt_ids": frozen_tokens([1] * 256)}, "prompt"),
        ({"prompt_ids": frozen_tokens([1, 269])}, "prompt[1]"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": 10**6}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 2 * 10**9}, "prompt_logprobs"),
        ({"stop": ("x",) * 1000}, "stop"),
        ({"stop": ("x", "")}, "stop[1]"),
        ({"stop": ("\ud800",)}, "stop[0]"),
        ({"stop": ("y" * 1025,)}, "stop[0]"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"cache_salt": b"x" * 257}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"sampling": SamplingParams(temperature=math.nan)}, "temperature"),
    ],
)
def test_one_bad_field_is_one_fault(changes: dict[str, object], field: str) -> None:
    assert fields_of(GOOD, **changes) == [field]


def test_no_more_alternatives_than_there_are_tokens_can_be_asked_for() -> None:
    few = engine_info(vocab_size=10, max_logprobs=20)
    for name in ("logprobs", "prompt_logprobs"):
        for asked, fields in ((10, []), (11, [name])):
            found = input_faults(attrs.evolve(GOOD, **{name: asked}), few, max_choices=4)
            assert [one.field for one in found] == fields


def test_every_fault_of_an_input_is_found() -> None:
    bad = {"n": 0, "stop": ("",), "prompt_ids": frozen_tokens([]), "sampling": SamplingParams(top_p=-1.0)}
    assert fields_of(GOOD, **bad) == ["prompt", "top_p", "stop[0]", "n"]


# ---- gate ----


async def test_a_full_gate_refuses_with_429_and_takes_groups_whole() -> None:
    gate = SequenceGate(limit=4, group_limit=4, when_full=WhenFull.REFUSE)
    await gate.enter(3)
    with pytest.raises(RequestError, match="retry later") as full:
        await gate.enter(2)
    assert full.value.status == 429
    assert gate.live == 3
    gate.leave(1)
    await gate.enter(2)
    assert gate.live == 4


async def test_a_waiting_gate_lets_groups_in_by_turn() -> None:
    gate = SequenceGate(limit=4, group_limit=4, when_full=WhenFull.WAIT)
    await gate.enter(4)
    order: list[str] = []

    async def enter(name: str, count: int) -> None:
        await gate.enter(count)
        order.append(name)

    tasks = [asyncio.create_task(enter("big", 3)), asyncio.create_task(enter("small", 1))]
    await asyncio.sleep(0)
    gate.leave(2)
    await asyncio.sleep(0)
    assert order == []  # the small one does not overtake
    gate.leave(2)
    await asyncio.gather(*tasks)
    assert order == ["big", "small"]
    assert gate.live == 4


async def test_a_cancelled_wait_takes_no_place_and_holds_up_nobody() -> None:
    gate = SequenceGate(limit=2, group_limit=2, when_full=WhenFull.WAIT)
    await gate.enter(2)
    big, small = asyncio.create_task(gate.enter(2)), asyncio.create_task(gate.enter(1))
    await asyncio.sleep(0)
    gate.leave(1)
    big.cancel()
    await asyncio.gather(big, return_exceptions=True)
    await asyncio.wait_for(small, 5)
    assert gate.live == 2


async def test_cancelled_in_the_moment_of_entering_gives_the_place_back() -> None:
    gate = SequenceGate(limit=1, group_limit=1, when_full=WhenFull.WAIT)
    await gate.enter(1)
    waiter = asyncio.create_task(gate.enter(1))
    await asyncio.sleep(0)
    gate.leave(1)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert gate.live == 0
    await asyncio.wait_for(gate.enter(1), 5)


def test_gates_are_as_wide_as_the_engines() -> None:
    infos = (engine_info(max_waiting=5, max_num_seqs=2), engine_info(max_waiting=1, max_num_seqs=1))
    assert (refusing_gate(infos).limit, refusing_gate(infos).group_limit) == (9, 1)
    assert (waiting_gate(infos).limit, waiting_gate(infos).group_limit) == (6, 1)


# ---- router ----


@attrs.frozen(kw_only=True)
class View:
    alive: bool = True
    load: LoadReport | None = None
    in_flight: int = 0


def pick(*views: EngineView) -> int:
    return LeastLoaded().pick(views)


def test_the_least_loaded_living_engine_is_picked() -> None:
    busy = View(load=LoadReport(running=5, waiting=5, total_blocks=10))
    assert pick(busy, View(load=LoadReport(running=3, total_blocks=10))) == 1
    assert pick(View(alive=False), busy) == 1


def test_what_was_sent_counts_even_if_the_report_is_older() -> None:
    assert pick(View(in_flight=4, load=LoadReport(total_blocks=10)), View(load=LoadReport(running=3))) == 1
    assert pick(View(in_flight=2), View(in_flight=1)) == 1


def test_waiting_weighs_more_the_fuller_the_pool() -> None:
    full = View(load=LoadReport(running=1, waiting=2, active_blocks=10, total_blocks=10))
    empty = View(load=LoadReport(running=3, waiting=2, active_blocks=1, total_blocks=10))
    assert pick(full, empty) == 1


def test_without_a_living_engine_there_is_nothing_to_pick() -> None:
    with pytest.raises(EngineDead):
        pick(View(alive=False))


# ---- text workers ----


async def test_small_work_is_done_at_once_and_large_work_on_a_thread() -> None:
    workers = text_workers(threads=1)
    here = threading.current_thread().name
    assert await workers.run(INLINE_CHARS, lambda: threading.current_thread().name) == here
    assert (await workers.run(INLINE_CHARS + 1, lambda: threading.current_thread().name)).startswith("ts-text")
    workers.close()


async def test_the_queue_of_large_work_is_bounded_and_frees_up() -> None:
    workers = text_workers(threads=1, limit=2)
    go = threading.Event()
    jobs = [asyncio.create_task(workers.run(10**6, lambda: go.wait(10))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="retry later") as full:
        await workers.run(10**6, lambda: True)
    assert full.value.status == 429
    jobs[0].cancel()  # whoever waited left; the thread is still at it
    await asyncio.gather(jobs[0], return_exceptions=True)
    with pytest.raises(RequestError):
        await workers.run(10**6, lambda: True)
    go.set()
    assert await asyncio.wait_for(jobs[1], 10)
    workers.pool.submit(int).result(10)  # behind all others, on the one thread
    for _ in range(2):
        await asyncio.sleep(0)
    assert workers.state.pending == 0
    assert await workers.run(10**6, lambda: True)
    workers.close()


async def test_a_job_that_raises_raises_for_its_caller_only() -> None:
    workers = text_workers(threads=1)

    def fail() -> int:
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        await workers.run(10**6, fail)
    assert await workers.run(10**6, lambda: 1) == 1
    workers.close()
