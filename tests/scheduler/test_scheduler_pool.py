"""Blocks: references, the empty stack, the LRU order, and the gauges over them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from scheduler_rig import build, prompt

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import int32
from tokenspeed.scheduler.packed import make_pool
from tokenspeed.scheduler.pool import NULL_BLOCK, BlockPool, Evicted, Pool


def single(num_parents: int) -> Pool:
    pool = make_pool(num_parents, (1,))
    assert isinstance(pool, BlockPool)
    return pool


def taken(pool: Pool, count: int) -> list[int]:
    return pool.take(0, count)[0].tolist()


@pytest.mark.contract("SP-13", "SP-52")
def test_the_null_block_is_reserved_and_never_granted() -> None:
    pool = single(9)
    assert (pool.usable, pool.groups, pool.blocks_in(0)) == (8, 1, 9)
    blocks = taken(pool, 8)
    assert sorted(blocks) == list(range(1, 9))
    assert NULL_BLOCK not in blocks
    with pytest.raises(InvariantBroken):
        pool.take(0, 1)


def test_blocks_are_granted_in_ascending_order_at_first_and_reused_last_in_first_out() -> None:
    pool = single(9)
    assert taken(pool, 3) == [1, 2, 3]
    pool.release(0, int32([2]))
    assert taken(pool, 2) == [2, 4]


def test_a_shared_block_stays_active_until_its_last_reference_goes() -> None:
    pool = single(4)
    block = int32(taken(pool, 1))
    pool.share(0, block)
    assert pool.held_alone(0, block) == 0
    pool.release(0, block)
    assert (pool.active, pool.empty, pool.held_alone(0, block)) == (1, 2, 1)
    pool.release(0, block)
    assert (pool.active, pool.empty) == (0, 3)


def test_a_release_too_many_breaks_an_invariant() -> None:
    pool = single(4)
    block = int32(taken(pool, 1))
    pool.release(0, block)
    with pytest.raises(InvariantBroken, match="released more often"):
        pool.release(0, block)


def test_an_empty_block_cannot_be_shared() -> None:
    with pytest.raises(InvariantBroken, match="empty block"):
        single(4).share(0, int32([2]))


def test_empty_blocks_go_first_and_then_the_findable_ones_released_longest_ago() -> None:
    pool = single(6)
    blocks = taken(pool, 4)
    pool.mark_findable(0, blocks)
    pool.release(0, int32([blocks[2], blocks[0]]))
    pool.release(0, int32([blocks[1], blocks[3]]))
    assert (pool.cached, pool.empty, pool.active) == (4, 1, 0)
    granted, evicted = pool.take(0, 3)
    assert granted.tolist() == [5, blocks[2], blocks[0]]
    assert evicted == (Evicted(0, (blocks[2], blocks[0])),)


def test_an_idle_block_that_is_found_again_leaves_the_eviction_order() -> None:
    pool = single(4)
    blocks = taken(pool, 3)
    pool.mark_findable(0, blocks)
    pool.release(0, int32(blocks))
    assert pool.idle_among(0, int32(blocks)) == 3
    pool.share(0, int32([blocks[0]]))
    assert pool.take(0, 1)[1] == (Evicted(0, (blocks[1],)),)
    assert pool.references(0, blocks[0]) == 1


def test_a_forgotten_idle_block_is_empty_and_a_forgotten_active_one_becomes_so_at_its_release() -> None:
    pool = single(4)
    blocks = taken(pool, 2)
    pool.mark_findable(0, blocks)
    pool.release(0, int32(blocks[:1]))
    pool.forget(0, blocks[0])
    pool.forget(0, blocks[1])
    assert (pool.active, pool.cached, pool.empty) == (1, 0, 2)
    pool.release(0, int32(blocks[1:]))
    assert (pool.active, pool.cached, pool.empty) == (0, 0, 3)


def test_promised_blocks_go_to_nobody_else() -> None:
    pool = single(6)
    pool.promise(0, 4)
    assert pool.fits((1,))
    assert not pool.fits((2,))
    with pytest.raises(InvariantBroken):
        pool.take(0, 2)
    pool.redeem(0, 3)
    assert pool.fits((4,))
    with pytest.raises(InvariantBroken):
        pool.redeem(0, 2)


def test_idle_hits_are_room_lost() -> None:
    pool = single(4)
    blocks = taken(pool, 3)
    pool.mark_findable(0, blocks)
    pool.release(0, int32(blocks[:2]))
    assert pool.fits((2,))
    assert pool.fits((2,), (int32(blocks[2:]),))
    assert not pool.fits((2,), (int32(blocks[:1]),))


def calls_of(action: Callable[[], object]) -> int:
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.contract("SP-10")
def test_counting_empty_blocks_takes_the_same_steps_whatever_the_size_of_the_pool() -> None:
    small, large = build(num_pages=10).scheduler, build(num_pages=100_001).scheduler
    assert small.empty_lcm_blocks() == 9
    assert large.empty_lcm_blocks() == 100_000
    assert calls_of(small.empty_lcm_blocks) == calls_of(large.empty_lcm_blocks)


@pytest.mark.contract("SP-10", "SP-11", "SP-12", "SP-13", "KM-16")
def test_the_three_gauges_follow_allocation_caching_and_eviction() -> None:
    rig = build(num_pages=11, page_tokens=4, max_num_seqs=4)
    scheduler = rig.scheduler
    assert (scheduler.num_usable_pages, scheduler.empty_lcm_blocks()) == (10, 10)
    first = rig.new(prompt(12), max_new=4)
    rig.round()
    second = rig.new(prompt(12), max_new=4)
    rig.round()
    # 15 positions at most: 4 blocks, of which the first two of the second request are shared.
    tables = [rig.blocks(first), rig.blocks(second)]
    assert tables[0][:2] == tables[1][:2]
    assert scheduler.active_lcm_blocks() == len({block for table in tables for block in table})
    rig.run()
    assert scheduler.active_lcm_blocks() == 0
    assert scheduler.available_lcm_blocks() == 10
    cached = scheduler.num_usable_pages - scheduler.empty_lcm_blocks() - scheduler.active_lcm_blocks()
    assert cached == len(scheduler.snapshot().index) == 3
