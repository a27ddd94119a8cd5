"""What a plan contains: decodes and chunks under one budget, at any depth."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_rig import Rig, build, config, prompt, zeroed

from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import FROM_DEVICE
from tokenspeed.plane.results import BlockRemoved
from tokenspeed.scheduler.config import Role


def rows_of(rig: Rig) -> dict[int, tuple[int, int]]:
    """One round; start and count by row."""
    batch = rig.round().batch
    if batch is None:
        return {}
    spans = zip(batch.starts.tolist(), batch.counts.tolist(), strict=True)
    return dict(zip(batch.rows.tolist(), spans, strict=True))


@pytest.mark.contract("SP-6")
def test_a_plan_lists_who_came_and_went_and_what_it_evicted_is_told() -> None:
    rig = build(num_pages=12, page_tokens=4, max_num_seqs=1, chunk_tokens=64)
    old = rig.new(prompt(12, seed=9), max_new=1)
    rig.round()
    known = set(rig.scheduler.snapshot().index)
    assert len(known) == 3
    new = rig.new(prompt(40), max_new=1)
    rig.events.clear()
    assert rig.scheduler.holds(old.row)
    plan = rig.plan()
    # It dropped the one, seated the other in the same slot, and took blocks that were findable until then.
    assert (plan.retired, plan.seated) == ((old.row,), (new.row,))
    assert not rig.scheduler.holds(old.row)
    assert plan.batch is not None
    assert plan.batch.slots.tolist() == [0]
    gone = known - set(rig.scheduler.snapshot().index)
    assert len(gone) == 2
    rig.land()
    removed = [event for event in rig.events if isinstance(event, BlockRemoved)]
    assert {name for event in removed for name in event.hashes} == gone
    rig.run()
    rig.check_tokens()


@pytest.mark.contract("SP-6")
def test_a_plan_lists_what_building_it_changed() -> None:
    rig = build()
    request = rig.new(prompt(20), max_new=2)
    plan = rig.plan()
    assert plan.seated == (request.row,)
    assert rig.table.schedule.slot[request.row] >= 0
    assert plan.grants[0].blocks.tolist() == list(rig.blocks(request))
    assert plan.batch is not None
    assert plan.batch.starts.tolist() == [0]
    assert plan.batch.counts.tolist() == [16]
    assert plan.batch.samples.tolist() == [False]
    assert plan.batch.input_ids.tolist() == prompt(20)[:16]
    assert rig.table.schedule.scheduled[request.row] == 16
    assert rig.table.schedule.landed[request.row] == 0
    rig.land()
    plans = rig.run()
    assert [row for plan in plans for row in plan.retired] == [request.row]
    assert rig.plan().retired == ()


def test_a_prompt_is_computed_in_chunks_and_only_the_last_is_sampled() -> None:
    rig = build(chunk_tokens=8, max_batched_tokens=64)
    request = rig.new(prompt(20), max_new=1)
    spans, sampled = [], []
    while rig.scheduler.sizes().held:
        batch = rig.round().batch
        if batch is not None:
            spans.append((int(batch.starts[0]), int(batch.counts[0])))
            sampled.append(bool(batch.samples[0]))
    assert spans == [(0, 8), (8, 8), (16, 4)]
    assert sampled == [False, False, True]
    assert request.forwards == 3


def test_chunks_share_the_budget_in_order_of_admission() -> None:
    rig = build(chunk_tokens=16, max_batched_tokens=24)
    first, second, third = (rig.new(prompt(30, seed=seed)) for seed in range(3))
    assert rows_of(rig) == {first.row: (0, 16), second.row: (0, 8)}
    assert rows_of(rig) == {first.row: (16, 14), second.row: (8, 10)}
    assert rows_of(rig) == {first.row: (30, 1), second.row: (18, 12), third.row: (0, 11)}


def test_decodes_come_before_chunks_in_the_batch_and_take_their_input_from_the_device() -> None:
    rig = build(chunk_tokens=16)
    old = rig.new(prompt(6), max_new=8)
    rig.round()
    new = rig.new(prompt(9, seed=1), max_new=8)
    plan = rig.plan()
    assert plan.batch is not None
    assert plan.batch.rows.tolist() == [old.row, new.row]
    assert plan.batch.input_ids.tolist() == [FROM_DEVICE, *prompt(9, seed=1)]
    assert all(array.dtype == np.int64 for array in (plan.batch.rows, plan.batch.slots))
    assert plan.batch.input_ids.dtype == np.int32
    assert plan.batch.samples.dtype == np.bool_


@pytest.mark.parametrize("depth", [0, 1])
def test_a_decode_has_its_token_in_every_forward_under_a_stream_of_long_prompts(depth: int) -> None:
    rig = build(chunk_tokens=16, max_batched_tokens=40, max_model_len=128, num_pages=200, overlap_schedule_depth=depth)
    talker = rig.new(prompt(4), max_new=100)
    rig.round()
    for at in range(60):
        if at % 2 == 0:
            rig.new(prompt(90, seed=at), max_new=2)
        spans = rows_of(rig)
        assert spans[talker.row][1] == 1
        assert max(count for _, count in spans.values()) <= 16
    rig.run()
    rig.check_tokens()


def test_every_resident_gets_a_token_of_each_forward_when_the_budget_is_smaller_than_the_slots() -> None:
    rig = build(max_num_seqs=8, max_batched_tokens=3, chunk_tokens=8)
    requests = [rig.new(prompt(2, seed=seed), max_new=5) for seed in range(6)]
    plans = rig.run()
    assert max(plan.batch.num_tokens for plan in plans if plan.batch is not None) == 3
    assert max(len(plan.batch.rows) for plan in plans if plan.batch is not None) == 3
    assert all(request.finish is Finish.LENGTH for request in requests)
    rig.check_tokens()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_new", [1, 2, 5])
def test_a_request_has_at_most_one_decode_forward_less_than_its_tokens(depth: int, max_new: int) -> None:
    rig = build(overlap_schedule_depth=depth, max_num_seqs=3)
    for seed in range(7):
        rig.new(prompt(3 + 5 * seed, seed=seed), max_new=max_new)
    rig.run()
    for request in rig.requests:
        assert request.decodes == max_new - 1
        assert max(request.computed) == len(request.prompt) + max_new - 2
    rig.check_tokens()


def test_nothing_is_planned_past_the_longest_sequence() -> None:
    rig = build(max_model_len=32, overlap_schedule_depth=1)
    request = rig.new(prompt(20), max_new=12)
    rig.run()
    assert len(request.out) == 12
    assert max(request.computed) == 30


@pytest.mark.contract("SP-59")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_decode_owns_room_for_as_many_tokens_ahead_as_forwards_may_run_ahead(depth: int) -> None:
    rig = build(overlap_schedule_depth=depth, page_tokens=4, chunk_tokens=64)
    request = rig.new(prompt(6), max_new=20)
    rooms = []
    for _ in range(8):
        rig.round()
        scheduled = int(rig.table.schedule.scheduled[request.row])
        rooms.append((scheduled, len(rig.blocks(request))))
    assert rooms == [(scheduled, -(-(scheduled + depth) // 4)) for scheduled in range(6, 14)]


@pytest.mark.contract("SP-59", "SP-60")
@pytest.mark.parametrize(
    ("role", "depth", "width", "ahead"),
    [
        (Role.PLAIN, 0, 1, 0),
        (Role.PLAIN, 1, 1, 1),
        (Role.PLAIN, 0, 4, 3),
        (Role.PLAIN, 1, 4, 7),
        (Role.DECODE, 1, 4, 7),
        (Role.PREFILL, 1, 1, 0),
        (Role.PREFILL, 1, 4, 0),
    ],
)
def test_room_is_reserved_for_what_forwards_in_flight_may_commit(
    role: Role, depth: int, width: int, ahead: int
) -> None:
    chosen = config(role=role, overlap_schedule_depth=depth, speculation_width=width, page_tokens=8, chunk_tokens=64)
    assert chosen.ahead_tokens == ahead
    if role is Role.PLAIN:
        rig = build(chosen)
        request = rig.new(prompt(6), max_new=40)
        for _ in range(20):
            rig.round()
            scheduled = int(rig.table.schedule.scheduled[request.row])
            exact, early = (-(-(scheduled + ahead + more) // 8) for more in (0, chosen.early_tokens))
            assert exact <= len(rig.blocks(request)) <= early


def test_a_page_too_small_for_the_reservation_is_refused() -> None:
    with pytest.raises(SettingsError, match="page_tokens is 4, must be at least 8"):
        config(overlap_schedule_depth=1, speculation_width=4, page_tokens=4)


@pytest.mark.parametrize("load", [3, 9])
def test_tokens_do_not_depend_on_depth_chunks_or_cache(load: int) -> None:
    streams = set()
    for depth in (0, 1):
        for prefix in (True, False):
            for chunk in (3, 64):
                rig = build(overlap_schedule_depth=depth, prefix=prefix, chunk_tokens=chunk, max_num_seqs=4)
                for seed in range(load):
                    rig.new(prompt(5 + 3 * (seed % 4), seed=seed % 3), max_new=3 + seed, eos_ends=bool(seed % 2))
                    rig.round()
                rig.run()
                rig.check_tokens()
                streams.add(tuple(tuple(request.out) for request in rig.requests))
    assert len(streams) == 1


@pytest.mark.contract("SP-39")
@pytest.mark.parametrize("zero", [True, False])
def test_pages_of_new_owners_are_listed_for_zeroing_where_the_group_needs_it(zero: bool) -> None:
    rig = build(zero_new_blocks=zero, page_tokens=4, num_pages=9, max_num_seqs=2)
    seen: list[tuple[int, int]] = []
    for seed in range(3):
        request = rig.new(prompt(10, seed=seed), max_new=8)
        held: set[tuple[int, int]] = set()
        while rig.scheduler.holds(request.row):
            plan = rig.plan()
            now = {(0, block) for block in rig.blocks(request)}
            if zero:
                assert now - held <= zeroed(plan)
            held |= now
            seen.extend(zeroed(plan))
            assert zeroed(plan) <= held
            rig.land()
    assert bool(seen) is zero
    rig.check_tokens()


def test_a_steady_decode_round_hands_out_the_same_arrays_of_constants() -> None:
    rig = build(num_pages=60)
    for seed in range(3):
        rig.new(prompt(5, seed=seed), max_new=40)
    rig.round()
    first, second = rig.round().batch, rig.round().batch
    assert first is not None
    assert second is not None
    assert second.rows is first.rows
    assert second.slots is first.slots
    assert second.starts.tolist() == (first.starts + 1).tolist()
    assert np.shares_memory(second.counts, first.counts)
    assert np.shares_memory(second.input_ids, first.input_ids)


def test_a_request_that_finishes_leaves_its_slot_to_the_next_one() -> None:
    rig = build(max_num_seqs=1, overlap_schedule_depth=1)
    for seed in range(3):
        rig.new(prompt(4, seed=seed), max_new=3)
    plans = rig.run()
    assert [slot for plan in plans if plan.batch for slot in plan.batch.slots.tolist()] == [0] * 9
    rig.check_tokens()


def test_with_a_spare_slot_the_next_one_is_in_the_forward_behind_the_last_one_of_a_request() -> None:
    """A forward has one row, and another request's in every turn: no forward is left out while the last result of
    the one before is under way."""
    rig = build(max_num_seqs=1, spare_slots=1, overlap_schedule_depth=1)
    for seed in range(3):
        rig.new(prompt(4, seed=seed), max_new=3)
    plans = rig.run()
    assert [number for number, plan in enumerate(plans) if plan.batch is not None] == list(range(9))
    assert [slot for plan in plans if plan.batch for slot in plan.batch.slots.tolist()] == [0] * 3 + [1] * 3 + [0] * 3
    rig.check_tokens()


def test_a_request_whose_end_was_not_foreseen_gives_up_its_place_before_its_last_forward_has_landed() -> None:
    rig = build(max_num_seqs=1, spare_slots=1, overlap_schedule_depth=1)
    first, second = rig.new(prompt(4, seed=0), max_new=9), rig.new(prompt(4, seed=1), max_new=2)
    rig.round()
    rig.round()
    rig.abort(first)
    plan = rig.plan()
    assert len(rig.queue) == 2
    assert plan.batch is not None
    assert plan.batch.rows.tolist() == [second.row]
    rig.run()
    rig.check_tokens()
