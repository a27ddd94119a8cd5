"""The host tier: what is stored when, what is loaded, and when a stored block can be found."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, build, prompt
from toy_groups import some_groups

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import LoadBackOp, WriteBackOp
from tokenspeed.plane.results import CacheAcks, HeadFacts
from tokenspeed.scheduler.config import WritePolicy

POLICIES = pytest.mark.parametrize("policy", list(WritePolicy), ids=lambda policy: policy.value)


def rig_of(policy: WritePolicy, *, num_pages: int = 9, host_parents: int = 33, **changes: object) -> Rig:
    return build(num_pages=num_pages, host_parents=host_parents, write_policy=policy, max_num_seqs=4, **changes)


def finish(rig: Rig, *prompts: list[int], max_new: int = 2) -> None:
    for tokens in prompts:
        rig.new(tokens, max_new=max_new)
        rig.run()
    rig.check_tokens()


def store_blocks(rig: Rig) -> list[WriteBackOp]:
    return [op for op in rig.host.of(WriteBackOp) if isinstance(op, WriteBackOp)]


@POLICIES
@pytest.mark.contract("CT-1", "CT-2", "SP-35")
def test_an_evicted_prompt_comes_back_from_the_host_without_being_computed_again(policy: WritePolicy) -> None:
    rig = rig_of(policy)
    first = prompt(16, seed=1)
    finish(rig, first, prompt(24, seed=2), prompt(24, seed=3))
    assert rig.scheduler.cache.match(rig.add(first).row, most=15).tokens == 12
    again = rig.new(first, max_new=4)
    plan = rig.round()
    loads = [op for op in plan.cache if isinstance(op, LoadBackOp)]
    assert [len(op.device_blocks) for op in loads] == [3]
    rig.run()
    assert min(again.computed) == 12
    rig.check_tokens()


@pytest.mark.contract("CT-2", "RA-30")
def test_write_through_stores_as_blocks_become_findable_and_pins_them_until_the_acknowledgment() -> None:
    rig = rig_of(WritePolicy.WRITE_THROUGH)
    rig.host.held = {WriteBackOp}
    rig.new(prompt(13), max_new=1)
    rig.round()
    plan = rig.plan()
    (store,) = plan.cache
    assert isinstance(store, WriteBackOp)
    assert (len(store.device_blocks), store.stream_ordered) == (3, False)
    rig.run()
    assert rig.scheduler.active_lcm_blocks() == 3
    assert not rig.scheduler.can_clear_cache()
    rig.host.held = set()
    rig.plan()
    assert rig.scheduler.active_lcm_blocks() == 0
    assert rig.scheduler.can_clear_cache()


@pytest.mark.contract("CT-2", "RA-27")
def test_write_back_stores_what_a_plan_evicts_before_the_plan_reuses_it() -> None:
    rig = rig_of(WritePolicy.WRITE_BACK)
    finish(rig, prompt(16, seed=1), prompt(12, seed=2))
    assert not store_blocks(rig)
    rig.new(prompt(20, seed=3), max_new=1)
    plan = rig.round()
    (store,) = [op for op in plan.cache if isinstance(op, WriteBackOp)]
    assert store.stream_ordered
    granted = {block for grant in plan.grants for block in grant.blocks.tolist()}
    assert set(store.device_blocks) <= granted


@POLICIES
@pytest.mark.contract("CT-9", "SP-19")
def test_a_stored_block_is_found_at_its_acknowledgment_and_not_before(policy: WritePolicy) -> None:
    rig = rig_of(policy, num_pages=7)
    rig.host.held = {WriteBackOp}
    first = prompt(12, seed=1)
    # Write-back evicts three blocks for the second prompt; write-through has stored them before.
    finish(rig, first)
    rig.new(prompt(16, seed=2), max_new=4)
    rig.round()
    if policy is WritePolicy.WRITE_BACK:
        assert store_blocks(rig)
        assert rig.scheduler.tier.open == 1
    named = rig.scheduler.snapshot().host.groups[0].named
    assert named
    assert all(rig.scheduler.tier.find(0, name) is None for name in named)
    rig.host.held = set()
    rig.run()
    rig.plan()
    assert all(rig.scheduler.tier.find(0, name) is not None for name in named)
    rig.check_tokens()


@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_gives_way_for_blocks_that_an_acknowledgment_will_free(depth: int) -> None:
    rig = build(
        num_pages=12,
        host_parents=33,
        write_policy=WritePolicy.WRITE_THROUGH,
        max_num_seqs=2,
        overlap_schedule_depth=depth,
    )
    rig.host.held = {WriteBackOp}
    rig.new(prompt(13, seed=9), max_new=1)
    rig.run()
    running = [rig.new(prompt(8, seed=seed), max_new=12) for seed in range(2)]
    for _ in range(20):
        rig.round()
    # Three blocks of the first are only being stored any more; the two want ten, and eleven is all there is.
    assert rig.scheduler.pool.empty + rig.scheduler.pool.cached == 0
    assert not any(request.finish is Finish.LENGTH for request in running)
    assert rig.plan().batch is None
    rig.host.held = set()
    rig.run()
    assert [request.preempted for request in running] == [0, 0]
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-16")
def test_a_repeated_acknowledgment_changes_nothing() -> None:
    rig = rig_of(WritePolicy.WRITE_THROUGH)
    finish(rig, prompt(13))
    (store,) = store_blocks(rig)
    rig.plan()
    before = rig.scheduler.snapshot().host
    rig.scheduler.advance_head(HeadFacts(acks=CacheAcks(write_backs=(store.op_id, 99), load_backs=(store.op_id,))))
    after = rig.scheduler.snapshot().host
    assert (before.groups[0].references, before.groups[0].findable) == (
        after.groups[0].references,
        after.groups[0].findable,
    )
    assert rig.scheduler.tier.open == 0


def test_equal_blocks_are_stored_once() -> None:
    rig = rig_of(WritePolicy.WRITE_THROUGH, num_pages=33)
    finish(rig, prompt(12), prompt(12), [*prompt(12), 7])
    rig.plan()
    stored = [block for op in store_blocks(rig) for block in op.device_blocks]
    assert len(stored) == 3


@pytest.mark.contract("SP-58")
def test_a_frozen_round_still_writes_through() -> None:
    rig = rig_of(WritePolicy.WRITE_THROUGH)
    rig.new(prompt(13), max_new=1)
    rig.round()
    rig.permit(forward=False)
    plan = rig.plan()
    assert plan.batch is None
    assert [type(op) for op in plan.cache] == [WriteBackOp]


@POLICIES
def test_a_full_host_tier_gives_up_what_was_not_used_for_longest(policy: WritePolicy) -> None:
    rig = rig_of(policy, num_pages=9, host_parents=5)
    finish(rig, *(prompt(12, seed=seed) for seed in range(6)))
    while rig.plan().cache or rig.host.pending:
        pass
    assert len(rig.scheduler.snapshot().host.groups[0].findable) == 4
    finish(rig, *(prompt(12, seed=seed) for seed in range(6)))
    rig.check_idle()


@POLICIES
def test_an_aborted_request_leaves_its_load_targets_alone_until_the_load_is_acknowledged(policy: WritePolicy) -> None:
    rig = rig_of(policy)
    first = prompt(16, seed=1)
    finish(rig, first, prompt(24, seed=2), prompt(24, seed=3))
    rig.host.held = {LoadBackOp}
    again = rig.new(first, max_new=4)
    rig.round()
    assert rig.host.of(LoadBackOp)
    rig.abort(again)
    rig.run()
    assert rig.scheduler.active_lcm_blocks() == 3
    rig.check_idle()


@pytest.mark.contract("SP-14")
def test_asking_whether_the_cache_can_be_cleared_changes_nothing_and_clearing_empties_both_tiers() -> None:
    rig = rig_of(WritePolicy.WRITE_THROUGH)
    finish(rig, prompt(16))
    while rig.plan().cache or rig.host.pending:
        assert not rig.scheduler.can_clear_cache() or not rig.scheduler.tier.open
    assert all(rig.scheduler.can_clear_cache() for _ in range(100))
    assert rig.scheduler.snapshot().host.groups[0].findable
    assert rig.scheduler.clear_cache()
    host = rig.scheduler.snapshot().host.groups[0]
    assert not host.findable
    assert not host.idle


@POLICIES
@pytest.mark.parametrize("kind", ["full and window", "full and state", "all", "wide blocks"])
def test_every_kind_of_group_is_stored_and_loaded(kind: str, policy: WritePolicy) -> None:
    rig = rig_of(policy, num_pages=17, host_parents=65, groups=some_groups(4)[kind])
    prompts = [prompt(21, seed=seed) for seed in range(7)]
    for _ in range(3):
        finish(rig, *prompts, max_new=6)
    assert rig.host.of(LoadBackOp)
    rig.check_idle()
