"""The futures executor gives the tokens of the streams executor, whatever the history of its batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from device_doubles import DECODE, batch, granted, seat
from futures_rig import FuturesRig, cpu_futures, sim_futures
from toy_rig import MAX_LEN, PAGE_TOKENS, SLOTS, VOCAB

from tokenspeed.device.executors.futures.runner import Fallback
from tokenspeed.testing import hash_continuation

WORKLOADS = {"cpu": 6, "simulated": 20}
RIGS = {"cpu": cpu_futures, "simulated": lambda **options: sim_futures(0.0, **options)}


def workload(seed: int, open_rig: Callable[..., AbstractContextManager[FuturesRig]], depth: int) -> FuturesRig:
    """Requests come and go at random, chunked at random, in an order that changes, with up to `depth` in flight.

    Returns the rig; asserts that each request got the tokens it gets alone.
    """
    draw = random.Random(seed)
    waiting = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 24))] for _ in range(8)]
    lengths = [draw.randint(1, MAX_LEN - 30) for _ in waiting]
    blocks_of = MAX_LEN // PAGE_TOKENS
    outputs: dict[int, list[int]] = {row: [] for row in range(len(waiting))}
    seated: dict[int, tuple[int, int]] = {}  # slot -> (row, tokens scheduled)
    flights: list[tuple[object, list[int]]] = []
    ended: list[tuple[int, int]] = []
    todo = list(range(len(waiting)))

    def commit(rig: FuturesRig) -> None:
        landing, rows = flights.pop(0)
        if rig.device is not None:
            rig.device.advance(1.0)
        for row, token in zip(rows, landing.result().tokens, strict=True):
            outputs[row].append(token)

    with open_rig() as rig:
        while todo or seated:
            seats, grants, rows, samples, table_rows = [], [], [], [], []
            shuffled, skipping = draw.random() < 0.3, draw.random() < 0.2
            for slot in range(SLOTS):
                if slot not in seated and todo and draw.random() < 0.5:
                    seated[slot] = (todo.pop(0), 0)
                    row = seated[slot][0]
                    seats.append(seat(slot, row=row, prompt_len=len(waiting[row])))
                    grants += [(slot, i, 1 + slot * blocks_of + i) for i in range(blocks_of)]
                if slot not in seated or (skipping and draw.random() < 0.3):
                    continue
                row, done = seated[slot]
                prompt, committed = waiting[row], outputs[row]
                if done < len(prompt):
                    tokens = prompt[done : done + draw.randint(1, 9)]
                else:
                    known = done - len(prompt)
                    tokens = [committed[known]] if known < len(committed) else DECODE
                rows.append((slot, done, tokens))
                table_rows.append(row)
                done += len(tokens)
                samples.append(done >= len(prompt))
                if done == len(prompt) + lengths[row] - 1:
                    ended.append((row, slot))
                    del seated[slot]
                else:
                    seated[slot] = (row, done)
            new = granted(*grants) if grants else ()
            if seats and not rows:
                rig.submit(seats=tuple(seats), grants=new)
            if rows:
                order = draw.sample(range(len(rows)), len(rows)) if shuffled else range(len(rows))
                work = batch(
                    *(rows[i] for i in order),
                    samples=[samples[i] for i in order],
                    table_rows=[table_rows[i] for i in order],
                )
                landing = rig.submit(work, seats=tuple(seats), grants=new)
                flights.append((landing, [table_rows[i] for i in order if samples[i]]))
            while len(flights) > depth:
                commit(rig)
            if ended and (not flights or draw.random() < 0.5):
                rig.handle.release(*map(tuple, zip(*ended, strict=True)))
                ended.clear()
        while flights:
            commit(rig)
    assert outputs == {
        row: hash_continuation(prompt, lengths[row], vocab_size=VOCAB) for row, prompt in enumerate(waiting)
    }
    return rig


@pytest.mark.contract("AF-6", "AF-53", "AF-57", "AF-67", "DO-5")
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("buckets", [(), (1, 2, 4, 8)], ids=["exact", "padded"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("backend", RIGS)
def test_random_batches_give_each_request_the_tokens_it_gets_alone(
    backend: str, depth: int, buckets: tuple[int, ...], asynchronous: bool
) -> None:
    reached: dict[Fallback, int] = {}
    steps = 0
    for seed in range(WORKLOADS[backend]):
        rig = workload(seed, lambda: RIGS[backend](buckets=buckets, asynchronous=asynchronous), depth)
        steps += rig.counters[0]
        for reason, count in rig.state.fallbacks.items():
            reached[reason] = reached.get(reason, 0) + count
    if asynchronous:
        assert steps > 50
        # Without padding, a prompt's last step and the first decode have the same shape.
        assert set(reached) == set(Fallback) - (set() if buckets else {Fallback.SHAPE})
    else:
        assert (steps, reached) == (0, {})
