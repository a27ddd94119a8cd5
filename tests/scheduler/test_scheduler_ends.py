"""Ends of requests: finished, aborted in every state, surplus forwards, and when pages come back."""

from __future__ import annotations

import pytest
from scheduler_rig import Request, Rig, build, oracle, prompt

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Finish
from tokenspeed.plane.results import CacheAcks, ForwardLanded, HeadFacts, StorageTick, TransferDone


def stopping_after(count: int, *, length: int = 6) -> list[int]:
    """A prompt after which the toy model stops by itself with its `count`-th token."""
    return next(p for s in range(5000) if len(oracle(p := prompt(length, seed=s), 30, eos_ends=True)) == count)


@pytest.mark.contract("SP-5", "IS-13")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_is_held_from_submission_to_the_plan_after_its_end(depth: int) -> None:
    rig = build(overlap_schedule_depth=depth)
    request = rig.add(prompt(6), max_new=3)
    assert not rig.scheduler.holds(request.row)
    rig.submit(request)
    assert rig.scheduler.holds(request.row)
    while request.finish is Finish.RUNNING:
        rig.round()
        assert rig.scheduler.holds(request.row)
    plan = rig.scheduler.next_execution_plan()
    assert plan.retired == (request.row,)
    assert not rig.scheduler.holds(request.row)


@pytest.mark.contract("IS-17")
def test_a_finished_request_keeps_pages_and_slot_until_its_surplus_forward_has_landed() -> None:
    rig = build(overlap_schedule_depth=1)
    request = rig.new(stopping_after(3), max_new=30, eos_ends=True)
    while request.finish is Finish.RUNNING:
        rig.round()
    # The forward planned before the stop was known is still under way.
    assert len(rig.queue) == 1
    assert rig.scheduler.active_lcm_blocks() == len(rig.blocks(request)) > 0
    plan = rig.plan()
    assert plan.retired == ()
    assert rig.scheduler.holds(request.row)
    rig.land()
    assert rig.scheduler.active_lcm_blocks() == 0
    assert rig.table.schedule.slot[request.row] >= 0
    assert rig.plan().retired == (request.row,)
    assert len(request.out) == 3
    rig.check_idle()


def in_state(name: str) -> tuple[Rig, Request]:
    """A 48-token prompt in chunks of 16 at depth 1, stopped at one of the moments an abort may come."""
    rig = build(overlap_schedule_depth=1, chunk_tokens=16, num_pages=30, max_num_seqs=2)
    request = rig.new(prompt(48), max_new=6)
    match name:
        case "waiting":
            pass
        case "before the first chunk landed":
            rig.plan()
        case "between chunks":
            rig.plan()
            rig.land()
        case "after the last launch, before its result":
            for _ in range(2):
                rig.plan()
                rig.land()
            rig.plan()
        case "decoding, two forwards in flight":
            for _ in range(3):
                rig.plan()
                rig.land()
            rig.plan()
            rig.plan()
        case "last token planned":
            rig.run(until=lambda: rig.table.schedule.scheduled[request.row] == 48 + 5)
            assert rig.queue
        case "already finished":
            while request.finish is Finish.RUNNING:
                rig.round()
        case "already aborted":
            rig.plan()
            rig.abort(request)
    return rig, request


MOMENTS = (
    "waiting",
    "before the first chunk landed",
    "between chunks",
    "after the last launch, before its result",
    "decoding, two forwards in flight",
    "last token planned",
    "already finished",
    "already aborted",
)


@pytest.mark.contract("SP-54", "IS-17")
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_abort_returns_pages_when_the_last_forward_has_landed_and_not_before(moment: str) -> None:
    rig, request = in_state(moment)
    said = len(request.out)
    rig.abort(request)
    held = set(rig.blocks(request))
    if rig.queue:
        assert held
        assert rig.scheduler.active_lcm_blocks() == len(held)
    # Another request may take anything but these pages.
    other = rig.new(prompt(40, seed=9), max_new=2)
    while rig.queue:
        assert not held & set(rig.blocks(other))
        assert rig.scheduler.holds(request.row)
        rig.land(down_to=len(rig.queue) - 1)
    assert set(rig.blocks(request)) == set()
    assert request.row in rig.plan().retired
    rig.land()
    rig.run()
    assert len(request.out) == said
    rig.check_tokens()
    rig.check_idle()


def test_an_aborted_waiting_request_is_gone_with_the_next_plan() -> None:
    rig = build(max_num_seqs=1)
    running, waiting = rig.new(prompt(4), max_new=8), rig.new(prompt(4, seed=1))
    rig.round()
    rig.abort(waiting)
    assert rig.scheduler.sizes().waiting == 0
    assert rig.plan().retired == (waiting.row,)
    rig.land()
    rig.run()
    assert running.finish is Finish.LENGTH
    rig.check_idle()


def test_a_retracted_request_can_be_aborted_while_it_waits() -> None:
    rig = build(num_pages=9, page_tokens=4, max_num_seqs=2, chunk_tokens=64)
    rig.new(prompt(8), max_new=20)
    victim = rig.new(prompt(8, seed=1), max_new=20)
    rig.run(until=lambda: victim.preempted > 0)
    rig.abort(victim)
    assert victim.row in rig.plan().retired
    rig.land()
    rig.run()
    rig.check_tokens()
    rig.check_idle()


def test_unknown_rows_of_an_abort_are_ignored() -> None:
    rig = build()
    request = rig.new(prompt(4))
    rig.scheduler.abort([7, -1, 10**6])
    rig.run()
    assert request.finish is Finish.LENGTH


def test_aborts_at_every_round_of_a_life_leave_nothing_behind() -> None:
    for depth in (0, 1):
        for at in range(14):
            rig = build(overlap_schedule_depth=depth, chunk_tokens=5, page_tokens=4)
            request = rig.new(prompt(13), max_new=6)
            other = rig.new(prompt(13), max_new=6)
            for _ in range(at):
                rig.round()
            rig.abort(request)
            rig.run()
            assert other.finish is Finish.LENGTH
            rig.check_tokens()
            rig.check_idle()


@pytest.mark.contract("SP-16", "SP-19")
def test_acknowledgments_of_unknown_operations_and_repeated_ones_change_nothing() -> None:
    rig = build()
    rig.new(prompt(9), max_new=6)
    rig.round()
    before = rig.scheduler.snapshot()
    acks = HeadFacts(acks=CacheAcks(write_backs=(3,), load_backs=(4,), snapshots=(5,), restores=(6,)))
    rig.scheduler.advance_head(acks)
    rig.scheduler.advance_head(acks)
    after = rig.scheduler.snapshot()
    assert (after.states, after.tables, after.references, after.index) == (
        before.states,
        before.tables,
        before.references,
        before.index,
    )
    rig.run()
    rig.check_tokens()


@pytest.mark.contract("SP-58")
@pytest.mark.parametrize("depth", [0, 1])
def test_no_forward_is_planned_without_permission_and_all_go_on_with_it(depth: int) -> None:
    rig = build(overlap_schedule_depth=depth)
    running, ended = rig.new(prompt(9), max_new=9), rig.new(prompt(5, seed=1), max_new=9)
    for _ in range(4):
        rig.round()
    rig.permit(forward=False)
    waiting = rig.new(prompt(5, seed=2))
    rig.abort(ended)
    plans = [rig.round() for _ in range(3)]
    assert [plan.batch for plan in plans] == [None] * 3
    assert not any(plan.needs_device() for plan in plans)
    assert [row for plan in plans for row in plan.retired] == [ended.row]
    out = len(running.out)
    rig.scheduler.advance_head(HeadFacts(tick=StorageTick(forward=False)))  # a second tick says the same
    assert rig.round().batch is None
    assert len(running.out) == out
    rig.permit(forward=True)
    rig.run()
    assert running.finish is waiting.finish is Finish.LENGTH
    rig.check_tokens()


@pytest.mark.contract("SP-8", "SP-22")
def test_several_results_are_taken_in_one_advance() -> None:
    rig = build(overlap_schedule_depth=1)
    request = rig.new(prompt(4), max_new=6)
    rig.plan()
    rig.plan()
    landed = rig.land()
    assert len(landed) == 2
    assert rig.table.schedule.landed[request.row] == 5
    assert not rig.scheduler.life.flying(request.row)
    rig.run()
    rig.check_tokens()


def test_events_that_cannot_be_are_broken_invariants() -> None:
    rig = build()
    request = rig.new(prompt(4), max_new=2)
    plan = rig.plan()
    with pytest.raises(InvariantBroken, match="without a peer"):
        rig.scheduler.advance([TransferDone(row=request.row, ok=True)])
    assert plan.batch is not None
    with pytest.raises(InvariantBroken, match="speculative"):
        rig.scheduler.advance([ForwardLanded(batch=plan.batch, accepted=plan.batch.counts)])
    rig.land()
    with pytest.raises(InvariantBroken, match="more forwards landed"):
        rig.scheduler.advance([ForwardLanded(batch=plan.batch)])


def test_a_last_token_that_ends_nobody_is_a_broken_invariant() -> None:
    rig = build()
    rig.new(prompt(4), max_new=1)
    plan = rig.plan()
    assert plan.batch is not None
    with pytest.raises(InvariantBroken, match="not finished"):
        rig.scheduler.advance([ForwardLanded(batch=plan.batch)])
