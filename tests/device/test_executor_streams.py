"""Both executors with the hash model: tokens, overlap, frozen inputs, log-probabilities, refusals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

import numpy as np
import pytest
import torch
from device_doubles import DECODE, CountingWakeup, batch, granted, seat
from toy_rig import MAX_LEN, PAGE_TOKENS, PAGES, SLOTS, VOCAB, ToyRig, toy_rig

from tokenspeed.device.toy import hash_context
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockGrants, Dispatch, ExecutionPlan, GroupBlocks, HistorySeed, LogprobPlan, int32

OpenRig: TypeAlias = Callable[..., AbstractContextManager[ToyRig]]


def next_token(context: list[int]) -> int:
    return hash_context(context) % VOCAB


def continuation(prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


def logits_of(context: list[int]) -> torch.Tensor:
    value = hash_context(context)
    logits = torch.sin(torch.arange(VOCAB) * 0.7 + value % 1000)
    logits[value % VOCAB] = 5.0
    return logits.double()


@pytest.fixture(params=["streams", "futures"])
def open_rig(request: pytest.FixtureRequest) -> OpenRig:
    """The same tests for both executors."""
    return partial(toy_rig, executor=request.param)


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def start(rig: ToyRig, slot: int = 0, prompt: list[int] = PROMPT, blocks: tuple[int, ...] = (1, 2, 3)) -> int:
    """Prefill `prompt` in `slot`; returns the sampled token."""
    landing = rig.submit(
        batch((slot, 0, prompt)),
        seats=(seat(slot),),
        grants=granted(*((slot, i, block) for i, block in enumerate(blocks))),
    )
    return landing.result().tokens[0]


def test_a_prompt_and_its_decode_steps_give_the_models_tokens(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        tokens = [start(rig)]
        for step in range(8):
            tokens += rig.submit(batch((0, len(PROMPT) + step, [tokens[-1]]))).result().tokens
    assert tokens == continuation(PROMPT, 9)


def test_the_sampler_is_told_the_position_each_new_token_will_have(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        token = start(rig)
        rig.submit(batch((0, len(PROMPT), [token]))).result()
    assert rig.sampler.positions == [len(PROMPT), len(PROMPT) + 1]


@pytest.mark.contract("DP-16")
def test_a_new_owner_cannot_reach_blocks_of_the_one_before(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        start(rig)
        with pytest.raises(InvariantBroken, match="rows without blocks"):
            rig.submit(batch((0, 0, PROMPT), table_rows=[5]), seats=(seat(0, row=5),), grants=granted((0, 0, 9)))


@pytest.mark.contract("DP-3", "DO-13")
def test_forwards_queue_up_behind_a_held_device_and_take_their_inputs_from_it(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        rig.hold()
        landings = [
            rig.submit(batch((0, 0, PROMPT)), seats=(seat(0),), grants=granted((0, 0, 1), (0, 1, 2), (0, 2, 3)))
        ]
        landings += [rig.submit(batch((0, len(PROMPT) + step, DECODE))) for step in range(6)]
        assert [landing.landed() for landing in landings] == [False] * 7
        rig.release()
        assert [landing.result().tokens[0] for landing in landings] == continuation(PROMPT, 7)
        assert all(landing.landed() for landing in landings)


def test_prefill_chunks_and_decodes_share_a_batch_in_any_order(open_rig: OpenRig) -> None:
    first, second = PROMPT, [7] * 20
    with open_rig() as rig:
        one = [start(rig)]
        two = []
        grants = granted((1, 0, 4), (1, 1, 5), (1, 2, 6))
        result = rig.submit(
            batch((1, 0, second[:9]), (0, len(first), DECODE), samples=[False, True]), seats=(seat(1),), grants=grants
        ).result()
        one += result.tokens
        result = rig.submit(batch((0, len(first) + 1, DECODE), (1, 9, second[9:]))).result()
        one.append(result.tokens[0])
        two.append(result.tokens[1])
        result = rig.submit(batch((1, 20, DECODE), (0, len(first) + 2, DECODE))).result()
        two.append(result.tokens[0])
        one.append(result.tokens[1])
    assert one == continuation(first, 4)
    assert two == continuation(second, 2)


def test_a_batch_of_chunks_that_samples_nothing_lands_without_tokens(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        landing = rig.submit(
            batch((0, 0, PROMPT[:4]), samples=[False]), seats=(seat(0),), grants=granted((0, 0, 1), (0, 1, 2))
        )
        assert landing.result().tokens == []
        assert rig.submit(batch((0, 4, PROMPT[4:]))).result().tokens == continuation(PROMPT, 1)


@pytest.mark.contract("OL-1", "OL-3", "DP-52")
def test_results_are_python_numbers_in_lists(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        landing = rig.submit(
            batch((0, 0, PROMPT)),
            seats=(seat(0),),
            grants=granted((0, 0, 1), (0, 1, 2)),
            logprobs=LogprobPlan(sampled=((0, 3),), prompt=((0, 2, 1),), prompt_targets=(tuple(PROMPT[2:4]),)),
        )
        result = landing.result()
    assert [type(token) for token in result.tokens] == [int]
    assert type(result.token_logprobs[0]) is float
    assert {type(i) for i in result.token_top_logprobs[0].ids} == {int}
    assert {type(v) for v in result.prompt_logprobs[0].values} == {float}
    assert result.device_s > 0.0
    assert (result.nan_rows, result.grammar_ends, result.jit_compiles) == ([], [], 0)


@pytest.mark.contract("DP-51")
def test_a_forward_in_flight_does_not_see_later_grants_seats_or_releases(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        start(rig)
        rig.hold()
        flight = rig.submit(batch((0, len(PROMPT), DECODE)))
        rig.handle.release((0,), (0,))
        # Slot 0 gets a new owner with other blocks while the forward above has not begun.
        other = rig.submit(
            batch((0, 0, [8, 8, 8]), table_rows=[5]), seats=(seat(0, row=5),), grants=granted((0, 0, 9), (0, 1, 10))
        )
        rig.release()
        assert flight.result().tokens == continuation(PROMPT, 2)[1:]
        assert other.result().tokens == continuation([8, 8, 8], 1)


@pytest.mark.contract("OL-14")
def test_the_sampler_forgets_a_request_behind_the_forwards_that_read_it(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        start(rig)
        rig.hold()
        flight = rig.submit(batch((0, len(PROMPT), DECODE)))
        rig.handle.release((0,), (0,))
        assert rig.sampler.log == [("seat", 0), ("sample", 0)]
        rig.release()
        flight.result()
        rig.submit().result()
        assert rig.sampler.log == [("seat", 0), ("sample", 0), ("sample", 0), ("release", 0)]


def test_a_release_of_a_slot_that_has_a_new_owner_leaves_it_alone(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        start(rig)
        rig.submit(batch((0, 0, [8]), table_rows=[5]), seats=(seat(0, row=5),), grants=granted((0, 0, 9))).result()
        rig.handle.release((0, 7), (0, -1))
        rig.submit(batch((0, 1, DECODE), table_rows=[5])).result()
        assert ("release", 0) not in rig.sampler.log


@pytest.mark.contract("OL-6")
def test_a_row_of_nan_is_flagged_and_its_neighbours_and_its_own_next_step_go_on(open_rig: OpenRig) -> None:
    with open_rig(nan_after=frozenset({96})) as rig:
        landing = rig.submit(
            batch((0, 0, [96]), (1, 0, PROMPT)),
            seats=(seat(0), seat(1)),
            grants=granted((0, 0, 1), (1, 0, 2), (1, 1, 3)),
        )
        following = rig.submit(batch((0, 1, DECODE), (1, len(PROMPT), DECODE)))
        assert landing.result().nan_rows == [0]
        assert landing.result().tokens[0] == 0  # what the row's next step takes in must be a token
        assert landing.result().tokens[1] == continuation(PROMPT, 1)[0]
        assert following.result().nan_rows == []
        assert following.result().tokens[1] == continuation(PROMPT, 2)[1]


@pytest.mark.contract("OL-4")
def test_logprobs_come_for_the_rows_that_asked_and_with_their_number_of_alternatives(open_rig: OpenRig) -> None:
    prompts = {0: [1, 2], 1: [3], 2: [4, 5, 6], 3: [7]}
    with open_rig() as rig:
        result = rig.submit(
            batch(*((slot, 0, prompt) for slot, prompt in prompts.items()), samples=[True, False, True, True]),
            seats=tuple(seat(slot) for slot in prompts),
            grants=granted(*((slot, 0, slot + 1) for slot in prompts)),
            logprobs=LogprobPlan(sampled=((0, 0), (3, 4))),
        ).result()
    assert set(result.token_logprobs) == {0, 3}
    assert set(result.token_top_logprobs) == {3}
    for index, token in ((0, result.tokens[0]), (3, result.tokens[2])):
        logs = torch.log_softmax(logits_of(prompts[index]), dim=0)
        assert result.token_logprobs[index] == pytest.approx(float(logs[token]), abs=1e-6)
    best = torch.log_softmax(logits_of(prompts[3]), dim=0).topk(4)
    assert result.token_top_logprobs[3].ids == tuple(best.indices.tolist())
    assert result.token_top_logprobs[3].values == pytest.approx(best.values.tolist(), abs=1e-6)


@pytest.mark.contract("OL-5")
@pytest.mark.parametrize("chunks", [[10], [3, 3, 4], [1] * 10], ids=["whole", "three", "ten"])
@pytest.mark.parametrize("first", [1, 4])
def test_prompt_logprobs_are_the_same_for_every_way_of_chunking(
    open_rig: OpenRig, chunks: list[int], first: int
) -> None:
    values: list[float] = []
    tops: list[tuple[int, ...]] = []
    with open_rig() as rig:
        grants, seats = granted((2, 0, 7), (2, 1, 8)), (seat(2),)
        for begin, count in zip(itertools.accumulate([0, *chunks[:-1]]), chunks, strict=True):
            low, high = max(first, begin + 1), min(begin + count, len(PROMPT) - 1)
            logprobs = LogprobPlan()
            if low <= high:
                logprobs = LogprobPlan(prompt=((0, low, 2),), prompt_targets=(tuple(PROMPT[low : high + 1]),))
            result = rig.submit(
                batch((2, begin, PROMPT[begin : begin + count]), samples=[begin + count == len(PROMPT)]),
                seats=seats,
                grants=grants,
                logprobs=logprobs,
            ).result()
            seats, grants = (), ()
            for part in result.prompt_logprobs:
                assert (part.index, part.first) == (0, low)
                values += part.values
                tops += [top.ids for top in part.top]
        assert result.tokens == continuation(PROMPT, 1)
    expected = [torch.log_softmax(logits_of(PROMPT[:at]), dim=0) for at in range(first, len(PROMPT))]
    assert values == pytest.approx([float(logs[PROMPT[first + i]]) for i, logs in enumerate(expected)], abs=1e-6)
    assert tops == [tuple(logs.topk(2).indices.tolist()) for logs in expected]


def test_prompt_logprobs_of_more_rows_than_are_computed_at_once_are_complete(open_rig: OpenRig) -> None:
    prompts = [[(7 * slot + i) % VOCAB for i in range(40)] for slot in range(3)]
    with open_rig() as rig:
        result = rig.submit(
            batch(*((slot, 0, prompt) for slot, prompt in enumerate(prompts))),
            seats=tuple(seat(slot) for slot in range(3)),
            grants=granted(*((slot, i, 1 + 8 * slot + i) for slot in range(3) for i in range(5))),
            logprobs=LogprobPlan(
                prompt=tuple((slot, 1, slot) for slot in range(3)),
                prompt_targets=tuple(tuple(prompt[1:]) for prompt in prompts),
            ),
        ).result()
    assert [(part.index, len(part.values)) for part in result.prompt_logprobs] == [(0, 39), (1, 39), (2, 39)]
    for part, prompt in zip(result.prompt_logprobs, prompts, strict=True):
        expected = [float(torch.log_softmax(logits_of(prompt[:at]), dim=0)[prompt[at]]) for at in range(1, 40)]
        assert part.values == pytest.approx(expected, abs=1e-6)
        assert all(len(top.ids) == part.index for top in part.top)


@pytest.mark.contract("RA-7")
def test_a_landing_sets_the_wakeup_it_was_given(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        rig.hold()
        landing, wakeup = rig.submit(batch((0, 0, [5])), seats=(seat(0),), grants=granted((0, 0, 1))), CountingWakeup()
        landing.notify(wakeup)
        assert wakeup.count == 0
        rig.release()
        assert wakeup.wait_for(1)


def test_a_plan_without_a_batch_lands_behind_the_work_it_queued(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        rig.hold()
        landing = rig.submit(pages_to_zero=(GroupBlocks(blocks=(4,)),))
        assert not landing.landed()
        rig.release()
        assert landing.result().tokens == []


def test_what_the_model_raises_comes_out_of_the_result(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        landing = rig.submit(
            batch((0, 0, [5])),
            seats=(seat(0),),
            grants=granted((0, 0, 1)),
            pages_to_zero=(GroupBlocks(blocks=(PAGES,)),),
        )
        with pytest.raises(IndexError):
            landing.result()


@pytest.mark.contract("DP-17", "DP-2")
def test_resets_of_slot_state_are_jobs_of_the_exec_stream(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        rig.hold()
        landing = rig.submit(batch((0, 0, [5])), seats=(seat(0),), grants=granted((0, 0, 1)))
        rig.handle.release((0,), (0,))
        assert {stream for stream, _ in rig.log} == {"exec"}
        assert [label for label in rig.labels if label in ("seat", "release")] == ["seat", "release"]
        assert rig.labels[0] == "seat"
        assert rig.labels[-1] == "release"
        assert rig.sampler.log == []
        rig.release()
        landing.result()


BROKEN = {
    "a row in a slot it does not own": {"batch": batch((1, 0, [5]))},
    "rows without blocks": {"batch": batch((0, len(PROMPT), [5] * 20))},
    "a context longer than a block table": {"batch": batch((0, MAX_LEN, [5]))},
    "counts do not fit": {
        "batch": batch((0, len(PROMPT), [5, 6])).__class__(
            rows=int32([0]),
            slots=int32([0]),
            starts=int32([0]),
            counts=int32([3]),
            samples=np.array([True]),
            input_ids=int32([1, 2]),
        )
    },
    "a grant outside the pool": {"grants": granted((0, 3, PAGES))},
    "a grant in a cache group": {
        "grants": (BlockGrants(group=1, slots=int32([0]), indices=int32([0]), blocks=int32([4])),)
    },
    "a seat outside the slots": {"seats": (seat(SLOTS),)},
    "does not predict those tokens": {
        "batch": batch((0, len(PROMPT), [5])),
        "logprobs": LogprobPlan(prompt=((0, 1, 0),), prompt_targets=((PROMPT[1],),)),
    },
    "without their tokens": {
        "batch": batch((0, len(PROMPT), [5])),
        "logprobs": LogprobPlan(prompt=((0, len(PROMPT) + 1, 0),)),
    },
    "a row that is not sampled": {
        "batch": batch((0, len(PROMPT), [5]), samples=[False]),
        "logprobs": LogprobPlan(sampled=((0, 1),)),
    },
}


@pytest.mark.contract("DP-16")
@pytest.mark.parametrize("fault", BROKEN)
def test_a_plan_that_contradicts_the_slots_breaks_an_invariant(open_rig: OpenRig, fault: str) -> None:
    with open_rig() as rig:
        start(rig)
        # The futures executor knows the tokens too, and may see that contradiction first.
        with pytest.raises(InvariantBroken, match=f"{fault}|contradicts the tokens of the worker"):
            rig.submit(**BROKEN[fault])


@pytest.mark.contract("DP-16")
def test_an_input_on_the_device_that_nothing_sampled_breaks_an_invariant(open_rig: OpenRig) -> None:
    with open_rig() as rig, pytest.raises(InvariantBroken, match="no forward sampled"):
        rig.submit(batch((0, 0, DECODE)), seats=(seat(0),), grants=granted((0, 0, 1)))


def test_a_dispatch_for_a_feature_that_was_not_built_breaks_an_invariant(open_rig: OpenRig) -> None:
    seed = HistorySeed(slot=0, prefix_length=0, first=0, tokens=int32([1]))
    with open_rig() as rig, pytest.raises(InvariantBroken, match="was not built"):
        rig.handle.execute(ExecutionPlan(round_id=1), Dispatch(histories=(seed,)), ())


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_random_companies_give_each_request_the_tokens_it_gets_alone(open_rig: OpenRig, depth: int) -> None:
    """Requests come and go in the slots at random, chunked at random, with up to `depth` forwards in flight."""
    draw = random.Random(depth)
    waiting = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 24))] for _ in range(12)]
    lengths = [draw.randint(1, MAX_LEN - 30) for _ in waiting]
    blocks_of = MAX_LEN // PAGE_TOKENS
    outputs: dict[int, list[int]] = {row: [] for row in range(len(waiting))}
    seated: dict[int, tuple[int, int]] = {}  # slot -> (row, tokens scheduled)
    flights: list[tuple[object, list[int]]] = []
    todo = list(range(len(waiting)))

    def commit() -> None:
        landing, rows = flights.pop(0)
        for row, token in zip(rows, landing.result().tokens, strict=True):
            outputs[row].append(token)

    with open_rig() as rig:
        while todo or seated:
            seats, grants, rows, samples, table_rows = [], [], [], [], []
            for slot in range(SLOTS):
                if slot not in seated and todo and draw.random() < 0.7:
                    seated[slot] = (todo.pop(0), 0)
                    seats.append(seat(slot, row=seated[slot][0]))
                    grants += [(slot, i, 1 + slot * blocks_of + i) for i in range(blocks_of)]
                if slot not in seated or draw.random() < 0.2:
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
                    del seated[slot]
                else:
                    seated[slot] = (row, done)
            new = granted(*grants) if grants else ()
            if seats and not rows:
                rig.submit(seats=tuple(seats), grants=new)
            if rows:
                order = draw.sample(range(len(rows)), len(rows))
                work = batch(
                    *(rows[i] for i in order),
                    samples=[samples[i] for i in order],
                    table_rows=[table_rows[i] for i in order],
                )
                landing = rig.submit(work, seats=tuple(seats), grants=new)
                flights.append((landing, [table_rows[i] for i in order if samples[i]]))
            while len(flights) > depth:
                commit()
        while flights:
            commit()
    assert outputs == {row: continuation(prompt, lengths[row]) for row, prompt in enumerate(waiting)}
