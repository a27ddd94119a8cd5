"""Memory pressure: who gives way, and that everybody ends in the end."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, build, prompt

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import ExecutionPlan
from tokenspeed.scheduler.config import Retraction
from tokenspeed.scheduler.policy import AgedPriority
from tokenspeed.scheduler.seniority import Seniority

ABORTING = (Retraction.SNAPSHOT, Retraction.ABORT)


def victims(plans: list[ExecutionPlan]) -> list[int]:
    return [row for plan in plans for row in plan.preempted]


@pytest.mark.contract("SP-6", "SP-42")
@pytest.mark.parametrize("depth", [0, 1])
def test_of_two_long_decodes_in_a_small_pool_the_later_is_retracted_and_both_finish_right(depth: int) -> None:
    rig = build(num_pages=12, page_tokens=4, max_num_seqs=2, chunk_tokens=64, overlap_schedule_depth=depth)
    elder, later = rig.new(prompt(8), max_new=24), rig.new(prompt(8, seed=1), max_new=24)
    plans = rig.run()
    assert victims(plans)[0] == later.row
    assert elder.preempted == 0
    assert elder.finish is later.finish is Finish.LENGTH
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-47")
def test_a_retracted_request_returns_by_itself_with_its_tokens_ahead_of_those_that_never_ran() -> None:
    rig = build(num_pages=12, page_tokens=4, max_num_seqs=2, chunk_tokens=64)
    rig.new(prompt(8), max_new=24)
    victim = rig.new(prompt(8, seed=1), max_new=24)
    rig.run(until=lambda: victim.preempted > 0)
    said = list(victim.out)
    fresh = rig.new(prompt(2, seed=2), max_new=2)
    assert said
    assert rig.scheduler.sizes().waiting == 2
    assert rig.table.schedule.slot[victim.row] == -1
    assert rig.table.tokens_of(victim.row).tolist() == victim.prompt + said
    forwards = victim.forwards
    rig.run(until=lambda: victim.forwards > forwards)
    assert fresh.first_planned_round < 0 or fresh.first_planned_round == rig.rounds
    rig.run()
    assert victim.out[: len(said)] == said
    rig.check_tokens()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("headroom", [0, 8])
def test_two_requests_that_need_sixty_percent_of_the_pool_each_both_finish_without_livelock(
    depth: int, headroom: int
) -> None:
    rig = build(
        num_pages=21,
        page_tokens=4,
        max_num_seqs=2,
        chunk_tokens=16,
        overlap_schedule_depth=depth,
        resume_headroom_tokens=headroom,
        prefix=False,
    )
    for seed in range(2):
        rig.new(prompt(6, seed=seed), max_new=42)
    rig.run(rounds=400)
    assert all(request.finish is Finish.LENGTH for request in rig.requests)
    assert sum(request.preempted for request in rig.requests) <= 3
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_is_a_victim_again_before_all_others_have_been_one(depth: int) -> None:
    rig = build(
        num_pages=18,
        page_tokens=4,
        max_num_seqs=3,
        chunk_tokens=64,
        overlap_schedule_depth=depth,
        resume_headroom_tokens=0,
    )
    requests = [rig.new(prompt(8, seed=seed), max_new=40) for seed in range(3)]
    plans = rig.run()
    assert victims(plans) == [request.row for request in reversed(requests)]
    assert all(request.finish is Finish.LENGTH for request in requests)
    rig.check_tokens()


def test_many_requests_in_a_pool_far_too_small_all_end_in_bounded_rounds() -> None:
    for depth in (0, 1):
        for policy in (None, AgedPriority()):
            rig = build(
                num_pages=14,
                page_tokens=4,
                max_num_seqs=6,
                chunk_tokens=6,
                overlap_schedule_depth=depth,
                policy=policy,
                resume_headroom_tokens=0,
            )
            for seed in range(20):
                rig.new(prompt(4 + seed % 9, seed=seed), max_new=10 + seed, priority=seed % 3)
            rig.run(rounds=2500)
            assert all(request.finish is Finish.LENGTH for request in rig.requests)
            assert sum(request.preempted for request in rig.requests) > 0
            rig.check_tokens()
            rig.check_idle()


@pytest.mark.contract("SP-6", "SP-41", "SP-46")
@pytest.mark.parametrize("depth", [0, 1])
def test_without_a_way_back_the_newest_resident_is_ended_and_its_pages_are_free_in_that_plan(depth: int) -> None:
    rig = build(
        num_pages=13,
        page_tokens=4,
        max_num_seqs=3,
        chunk_tokens=64,
        overlap_schedule_depth=depth,
        retraction=ABORTING,
    )
    requests = [rig.new(prompt(10, seed=seed), max_new=24) for seed in range(3)]
    plans = [rig.round()]
    while not plans[-1].aborts:
        free = rig.scheduler.available_lcm_blocks()
        plans.append(rig.round())
    plan = plans[-1]
    assert [abort.row for abort in plan.aborts] == [requests[2].row]
    assert "12 pages" in plan.aborts[0].reason
    assert plan.retired == (requests[2].row,)
    assert plan.preempted == ()
    assert rig.scheduler.available_lcm_blocks() > free
    assert not rig.scheduler.holds(requests[2].row)
    later = rig.run()
    assert all(requests[2].row not in late.retired for late in later)
    rig.check_tokens()
    rig.check_idle()


def test_the_newest_resident_is_ended_even_while_it_still_prefills() -> None:
    rig = build(num_pages=14, page_tokens=4, max_num_seqs=3, chunk_tokens=2, retraction=ABORTING)
    rig.new(prompt(6), max_new=40)
    for _ in range(10):
        rig.round()
    newest = rig.new(prompt(30, seed=1), max_new=4)
    rig.run()
    assert newest.finish is Finish.ABORT
    assert newest.out == []
    assert rig.requests[0].finish is Finish.LENGTH
    rig.check_tokens()
    rig.check_idle()


def yielding(rig: Rig) -> list[int]:
    return [row for row, state in rig.scheduler.snapshot().states.items() if state.name == "YIELDING"]


@pytest.mark.contract("SP-54", "SP-59")
def test_a_victim_with_a_forward_in_flight_keeps_its_pages_until_it_landed_and_nobody_stalls() -> None:
    rig = build(num_pages=12, page_tokens=4, max_num_seqs=2, chunk_tokens=64, overlap_schedule_depth=1)
    elder, later = rig.new(prompt(8), max_new=24), rig.new(prompt(8, seed=1), max_new=24)
    plan = rig.round()
    while not yielding(rig):
        plan = rig.plan()
        if yielding(rig):
            break
        rig.land(down_to=1)
    assert yielding(rig) == [later.row]
    assert plan.batch is not None
    # The elder's page was reserved a forward ago, so it goes on in the very plan that found the shortage.
    assert plan.batch.rows.tolist() == [elder.row]
    assert plan.preempted == ()
    held = rig.blocks(later)
    assert held
    # A slow device: nothing has landed when the next plan is made.
    assert rig.plan().preempted == ()
    assert rig.blocks(later) == held
    rig.land(down_to=1)
    after = rig.plan()
    assert after.preempted == (later.row,)
    assert after.batch is not None
    assert after.batch.rows.tolist() == [elder.row]
    rig.land(down_to=1)
    rig.run()
    rig.check_tokens()
    rig.check_idle()


def test_a_decode_without_a_page_waits_for_the_victims_forward_and_then_goes_on() -> None:
    rig = build(num_pages=12, page_tokens=4, max_num_seqs=2, chunk_tokens=64, overlap_schedule_depth=1)
    elder, later = rig.new(prompt(8), max_new=24), rig.new(prompt(10, seed=1), max_new=20)
    while not yielding(rig):
        rig.land(down_to=1)
        rig.plan()
    scheduled = int(rig.table.schedule.scheduled[elder.row])
    assert scheduled == 4 * len(rig.blocks(elder))  # the reserved room is used up
    assert rig.plan().batch is None  # nothing landed, so there is no page for the next token
    assert yielding(rig) == [later.row]
    rig.land()
    plan = rig.plan()
    assert plan.preempted == (later.row,)
    assert plan.batch is not None
    assert (plan.batch.rows.tolist(), plan.batch.starts.tolist()) == ([elder.row], [scheduled])
    rig.land()
    rig.run()
    rig.check_tokens()
    rig.check_idle()


def test_a_victim_that_ends_while_it_yields_is_not_retracted() -> None:
    rig = build(num_pages=12, page_tokens=4, max_num_seqs=2, chunk_tokens=64, overlap_schedule_depth=1)
    rig.new(prompt(8), max_new=24)
    later = rig.new(prompt(8, seed=1), max_new=24)
    while True:
        rig.plan()
        if yielding(rig):
            break
        rig.land(down_to=1)
    rig.abort(later)
    rig.run()
    assert later.preempted == 0
    rig.check_tokens()
    rig.check_idle()


def test_a_request_keeps_its_first_date_of_admission_so_that_the_eldest_of_two_victims_gets_on() -> None:
    seniority = Seniority()
    elder, later, third = 7, 3, 5
    for row in (elder, later, third):
        seniority.note_admitted(row)
    assert max((elder, later, third), key=seniority.as_victim) == third
    # The elder gave way and is back: it is spared while another can go, and is no newcomer after that.
    seniority.note_retracted(elder)
    seniority.note_admitted(elder)
    assert max((elder, later), key=seniority.as_victim) == later
    assert max((elder, later, third), key=seniority.admitted) == third
    # Of those that were victims the newest goes first again.
    seniority.note_retracted(third)
    seniority.note_admitted(third)
    assert max((elder, later, third), key=seniority.as_victim) == later
    seniority.note_retracted(later)
    assert max((elder, later, third), key=seniority.as_victim) == third
    assert seniority.was_retracted(elder)
    # One that has ended leaves nothing to the next request in its row.
    seniority.forget(elder)
    seniority.note_admitted(elder)
    assert not seniority.was_retracted(elder)
    assert max((elder, later, third), key=seniority.admitted) == elder


@pytest.mark.parametrize("headroom", [0, 16])
def test_a_retracted_request_comes_back_with_headroom_only_or_another_has_to_give_way_to_it(headroom: int) -> None:
    rig = build(
        num_pages=14,
        page_tokens=4,
        max_num_seqs=3,
        chunk_tokens=64,
        resume_headroom_tokens=headroom,
        prefix=False,
    )
    elder, short, victim = (rig.new(prompt(8, seed=at), max_new=new) for at, new in enumerate((40, 14, 40)))
    rig.run(until=lambda: victim.preempted > 0)
    away = victim.forwards
    rig.run(until=lambda: victim.forwards > away)
    # There was room for its own tokens once the short one had gone, and for more only after the elder.
    assert short.finish is Finish.LENGTH
    assert (elder.finish is Finish.LENGTH) == (headroom > 0)
    rig.run()
    assert (elder.preempted, victim.preempted) == (int(not headroom), 1)
    rig.check_tokens()
    rig.check_idle()


def test_newcomers_wait_rather_than_push_a_running_request_out() -> None:
    rig = build(num_pages=12, page_tokens=4, max_num_seqs=6, chunk_tokens=64, prefix=False)
    runner = rig.new(prompt(8), max_new=16)
    rig.round()
    for seed in range(1, 8):
        rig.new(prompt(7, seed=seed), max_new=1)
    rig.run()
    assert runner.preempted == 0
    rig.check_tokens()


def test_a_recomputed_request_may_take_its_own_blocks_from_the_cache() -> None:
    rig = build(num_pages=16, page_tokens=4, max_num_seqs=2, chunk_tokens=64)
    rig.new(prompt(8), max_new=14)
    victim = rig.new(prompt(8, seed=1), max_new=40)
    third = rig.new(prompt(8, seed=2), max_new=40)
    rig.run()
    assert victim.preempted + third.preempted > 0
    rig.check_tokens()
    rig.check_idle()
