"""Storage over the real scheduler: prompts that come back from storage, and every way in which they do not."""

from __future__ import annotations

import random

import pytest
from scheduler_rig import Request, prompt
from toy_groups import some_groups
from toy_storage import StoredRig, stored_rig

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import LoadBackOp, RestoreBatch, SnapshotBatch, StorageVerb, WriteBackOp
from tokenspeed.scheduler.config import STORAGE_WAIT_S, Role, WritePolicy
from tokenspeed.scheduler.states import State


def in_storage(rig: StoredRig, *prompts: list[int]) -> None:
    """Compute prompts, have their blocks stored, and forget them in all nearer tiers."""
    for ids in prompts:
        rig.rig.new(ids, max_new=1)
        rig.run()
    rig.settle()
    assert rig.rig.scheduler.clear_cache()
    rig.rig._drain()


@pytest.mark.contract("CT-19", "CT-24", "CT-23", "SP-20", "SP-21", "SP-33")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_comes_back_from_storage_without_being_computed_again(depth: int) -> None:
    rig = stored_rig(overlap_schedule_depth=depth)
    ids = prompt(19, seed=1)
    in_storage(rig, ids)
    assert len(rig.contents) == 4
    rig.served = False
    rig.rig.new(ids, max_new=5)
    assert rig.rig.scheduler.sizes().waiting == 1
    (query,) = rig.round().storage_ops()
    assert query.verb is StorageVerb.QUERY
    rig.end(query.op_id)
    (get,) = rig.round().storage_ops()
    assert get.verb is StorageVerb.GET
    for _ in range(4):
        plan = rig.round()
        assert (plan.batch, plan.cache) == (None, ())
    rig.end(get.op_id)
    # The completion is in this round's head, so the request is in this round's plan.
    plan = rig.round()
    assert [(type(op), len(op.device_blocks)) for op in plan.cache] == [(LoadBackOp, 4)]
    assert plan.batch is not None
    assert (plan.batch.starts.tolist(), plan.batch.counts.tolist()) == ([16], [3])
    rig.served = True
    rig.run()
    rig.rig.check_tokens()
    rig.settle()
    rig.rig.check_idle()
    assert rig.of(StorageVerb.PUT)[-1].keys != get.keys


@pytest.mark.contract("SP-33")
@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_a_get_that_fails_late_costs_the_hit_and_nothing_else(which: str) -> None:
    rig = stored_rig()
    ids = prompt(19, seed=1)
    in_storage(rig, ids)
    rig.served = False
    request = rig.rig.new(ids, max_new=5)
    rig.end(rig.round().storage_ops()[0].op_id)
    (get,) = rig.round().storage_ops()
    for _ in range(5):
        assert rig.round().batch is None
    rig.end(get.op_id, fails=lambda at: which == "all" or at == {"first": 0, "last": 3}[which])
    rig.served = True
    rig.run()
    assert min(request.computed) == (12 if which == "last" else 0)
    rig.rig.check_tokens()
    rig.settle()
    rig.rig.check_idle()


@pytest.mark.contract("CT-17")
@pytest.mark.parametrize("policy", list(WritePolicy), ids=lambda policy: policy.value)
def test_a_put_that_never_ends_holds_up_neither_acknowledgments_nor_loads(policy: WritePolicy) -> None:
    rig = stored_rig(num_pages=9, write_policy=policy)
    rig.served = False
    first = prompt(16, seed=1)
    for ids in (first, prompt(24, seed=2), prompt(24, seed=3)):
        rig.rig.new(ids, max_new=2)
        for _ in range(30):
            rig.round()
            for op_id in sorted(rig.executor.open):
                if rig.executor.open[op_id].verb is not StorageVerb.PUT:
                    rig.end(op_id)
    puts = rig.of(StorageVerb.PUT)
    assert puts
    assert not rig.rig.host.pending
    written = {block for op in rig.rig.host.of(WriteBackOp) for block in op.host_blocks}  # type: ignore[union-attr]
    assert {block for op in puts for block in op.host_blocks} <= written
    again = rig.rig.new(first, max_new=4)
    rig.run(until=lambda: not rig.rig.scheduler.sizes().held)
    assert min(again.computed) == 12
    rig.rig.check_tokens()
    assert not rig.rig.scheduler.can_clear_cache()


@pytest.mark.contract("SP-35")
def test_one_life_yields_all_eight_kinds_of_cache_entries() -> None:
    rig = stored_rig(num_pages=12, images=2, max_num_seqs=2, resume_headroom_tokens=0)
    in_storage(rig, prompt(16, seed=7))
    seen: set[object] = set()

    def note() -> None:
        for op in rig.round().cache:
            seen.add(getattr(op, "verb", type(op)))

    rig.rig.new(prompt(16, seed=7), max_new=1)
    for seed in range(2):
        rig.rig.new(prompt(14, seed=seed), max_new=24)
    for _ in range(150):
        note()
    rig.served = False
    leaving = rig.rig.new(prompt(16, seed=9), max_new=4)
    note()
    rig.rig.abort(leaving)
    note()
    assert seen == {WriteBackOp, LoadBackOp, SnapshotBatch, RestoreBatch, *StorageVerb}
    rig.rig.check_tokens()


@pytest.mark.contract("SP-55")
@pytest.mark.parametrize("moment", ["submitted", "asked", "fetching"])
def test_an_abort_while_storage_prepares_ends_the_request_with_the_next_plan(moment: str) -> None:
    rig = stored_rig()
    ids = prompt(19, seed=1)
    in_storage(rig, ids)
    rig.served = False
    request = rig.rig.new(ids, max_new=5)
    if moment != "submitted":
        plan = rig.round()
    if moment == "fetching":
        rig.end(plan.storage_ops()[0].op_id)
        plan = rig.round()
        assert plan.storage_ops()[0].verb is StorageVerb.GET
    rig.rig.abort(request)
    assert rig.rig.scheduler.holds(request.row)
    plan = rig.round()
    assert plan.retired == (request.row,)
    assert [op.verb for op in plan.storage_ops()] == [StorageVerb.CANCEL] * (moment != "submitted")
    assert rig.rig.scheduler.can_clear_cache() == (moment != "fetching")
    for op_id in tuple(rig.executor.open):
        rig.executor.cancel(op_id)
    rig.settle()
    rig.rig.check_idle()


@pytest.mark.contract("CT-33", "SP-58")
def test_frozen_rounds_plan_cancels_and_nothing_else_of_storage() -> None:
    rig = stored_rig()
    first, second = prompt(19, seed=1), prompt(19, seed=2)
    in_storage(rig, first, second)
    rig.served = False
    requests = [rig.rig.new(ids, max_new=5) for ids in (first, second)]
    for op in rig.round().storage_ops():
        rig.end(op.op_id)
    gets = rig.round().storage_ops()
    assert len(gets) == 2
    rig.forward = False
    rig.rig.abort(requests[0])
    late = rig.rig.new(prompt(19, seed=3), max_new=2)
    plan = rig.round()
    assert [(op.verb, op.op_id) for op in plan.storage_ops()] == [(StorageVerb.CANCEL, gets[0].op_id)]
    assert plan.retired == (requests[0].row,)
    rig.executor.cancel(gets[0].op_id)
    rig.end(gets[1].op_id)
    for _ in range(3):
        assert rig.round().cache == ()
    assert rig.rig.scheduler.life.of(late.row) is State.PREPARING
    assert rig.rig.scheduler.life.of(requests[1].row) is State.WAITING
    rig.forward = rig.served = True
    rig.run()
    rig.rig.check_tokens()
    assert min(requests[1].computed) == 16


@pytest.mark.contract("SP-56")
def test_a_decode_node_gets_what_it_lacks_from_its_peer_and_not_from_storage() -> None:
    rig = stored_rig(role=Role.DECODE)
    rig.rig.new(prompt(19), max_new=3)
    plan = rig.round()
    assert len(plan.remote_prefill) == 1
    assert plan.storage_ops() == ()
    assert rig.executor.log == []


@pytest.mark.parametrize("end", ["admitted", "aborted"])
def test_what_was_fetched_stays_in_the_host_tier_until_its_request_is_admitted_or_gone(end: str) -> None:
    rig = stored_rig(max_num_seqs=1)
    ids = prompt(19, seed=1)
    in_storage(rig, ids)
    running = rig.rig.new(prompt(3, seed=5), max_new=12)
    rig.round()
    waiting = rig.rig.new(ids, max_new=3)
    for _ in range(4):
        rig.round()
    assert rig.rig.scheduler.life.of(waiting.row) is State.WAITING
    assert len(rig.rig.scheduler.storage.pins()) == 4
    if end == "aborted":
        rig.rig.abort(waiting)
    else:
        rig.run(until=lambda: running.retired and waiting.forwards > 0)
    rig.round()
    rig.round()
    assert rig.rig.scheduler.storage.pins() == ()
    rig.run()
    rig.rig.check_tokens()
    rig.settle()
    rig.rig.check_idle()


def test_a_storage_that_does_not_answer_parks_no_slot_and_nobody_for_ever() -> None:
    rig = stored_rig(max_num_seqs=2)
    rig.served = False
    parked = [rig.rig.new(prompt(19, seed=seed), max_new=3) for seed in range(6)]
    rig.round()
    short = rig.rig.new(prompt(3), max_new=3)
    for _ in range(6):
        rig.round()
    assert short.finish is Finish.LENGTH
    assert all(request.forwards == 0 for request in parked)
    rig.executor.now_s = STORAGE_WAIT_S
    rig.run(until=lambda: all(request.finish is Finish.LENGTH for request in parked))
    rig.rig.check_tokens()
    assert [op.verb for op in rig.executor.log if op.verb is StorageVerb.CANCEL] == [StorageVerb.CANCEL] * 6
    for op_id in tuple(rig.executor.open):
        rig.executor.cancel(op_id)
    rig.served = True
    rig.settle()
    rig.rig.check_idle()


def test_a_victim_with_a_page_that_storage_may_fail_to_fill_is_computed_again() -> None:
    rig = stored_rig(num_pages=11, images=2, max_num_seqs=2, resume_headroom_tokens=4)
    ids = prompt(14, seed=2)
    in_storage(rig, ids)
    rig.served = False
    old = rig.rig.new(prompt(3), max_new=30)
    victim = rig.rig.new(ids, max_new=20)
    rig.end(rig.round().storage_ops()[0].op_id)
    (get,) = rig.round().storage_ops()
    # It goes on without the fetch, which is still under way when it has to give way.
    rig.executor.now_s = STORAGE_WAIT_S
    rig.run(until=lambda: victim.preempted > 0)
    assert get.op_id in rig.executor.open
    assert rig.rig.scheduler.life.of(victim.row) is State.WAITING
    rig.end(get.op_id, fails=lambda at: True)
    rig.served = True
    rig.run()
    assert old.finish is victim.finish is Finish.LENGTH
    rig.rig.check_tokens()
    rig.settle()
    rig.rig.check_idle()


SHAPES = list(some_groups(4).values())


@pytest.mark.parametrize("seed", range(10))
def test_random_lives_with_storage_that_fails_and_dawdles_keep_every_rule(seed: int) -> None:
    dice = random.Random(seed)
    rig = stored_rig(
        num_pages=dice.choice((16, 24, 40)),
        host_parents=dice.choice((6, 20, 60)),
        images=dice.choice((0, 2)),
        write_policy=dice.choice(list(WritePolicy)),
        overlap_schedule_depth=seed % 2,
        groups=SHAPES[seed % len(SHAPES)],
    )
    rig.served = False
    live: list[Request] = []
    for _ in range(70):
        if dice.random() < 0.35 and len(live) < 8:
            ids = prompt(16, seed=dice.randrange(3)) + prompt(dice.randrange(1, 12), seed=dice.randrange(4))
            live.append(rig.rig.new(ids, max_new=dice.randrange(1, 8)))
        if dice.random() < 0.08 and live:
            rig.rig.abort(dice.choice(live))
        rig.forward = dice.random() > 0.05
        rig.executor.pressure = dice.choice((0.0, 0.0, 0.99, 1.0))
        for op_id in sorted(rig.executor.open):
            if dice.random() < 0.4:
                verb = rig.executor.open[op_id].verb
                if verb is StorageVerb.GET and dice.random() < 0.15:
                    rig.executor.cancel(op_id)
                else:
                    rig.end(op_id, fails=lambda at: dice.random() < 0.15)
        rig.round()
        live = [request for request in live if request.finish is Finish.RUNNING]
        if dice.random() < 0.05 and rig.rig.scheduler.clear_cache():
            rig.rig._drain()
    rig.forward = rig.served = True
    rig.executor.pressure = 0.0
    rig.run()
    rig.rig.check_tokens()
    rig.settle()
    rig.rig.check_idle()
    assert not rig.executor.open


def test_a_prompt_too_short_to_be_worth_it_is_not_looked_up() -> None:
    rig = stored_rig(storage_min_tokens=16)
    rig.served = False
    rig.rig.new(prompt(16, seed=1), max_new=2)  # of which a hit may cover 15
    assert rig.round().storage_ops() == ()
    rig.rig.new(prompt(17, seed=2), max_new=2)
    assert [op.verb for op in rig.round().storage_ops()] == [StorageVerb.QUERY]


def test_a_request_waits_for_storage_as_long_as_it_is_told() -> None:
    rig = stored_rig(storage_wait_s=3.0)
    rig.served = False
    waiting = rig.rig.new(prompt(19, seed=1), max_new=2)
    rig.round()
    rig.executor.now_s = 2.9
    rig.round()
    assert rig.rig.scheduler.life.of(waiting.row) is State.PREPARING
    rig.executor.now_s = 3.0
    plan = rig.round()
    assert [op.verb for op in plan.storage_ops()] == [StorageVerb.CANCEL]
    assert plan.batch is not None
