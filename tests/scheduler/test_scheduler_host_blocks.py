"""Host blocks, operations and write-through in small: pins, names, numbers, and what is void."""

from __future__ import annotations

import pytest

from tokenspeed.plane.plan import EMPTY_INT32, GroupBlocks, SnapshotBatch, WriteBackOp, int32
from tokenspeed.plane.results import CacheAcks
from tokenspeed.scheduler.config import WritePolicy
from tokenspeed.scheduler.host.blocks import HostBlocks, host_blocks
from tokenspeed.scheduler.host.operations import Load, Operations, Restore, Snapshot, Store
from tokenspeed.scheduler.host.tier import STORED_PER_PLAN, HostTier, host_tier
from tokenspeed.scheduler.packed import make_pool
from tokenspeed.scheduler.pool import Pool


def names(count: int, *, first: int = 0) -> list[bytes]:
    return [bytes([number]) * 4 for number in range(first, first + count)]


def filled(host: HostBlocks, chosen: list[bytes]) -> list[int]:
    blocks = host.reserve(0, chosen, certain=True)
    host.wrote(0, blocks)
    host.unpin(0, blocks)
    return blocks.tolist()


def test_a_name_is_held_from_its_reservation_on_and_found_once_it_is_written() -> None:
    host = host_blocks(5, (1,))
    (block,) = host.reserve(0, names(1)).tolist()
    assert (host.find(0, names(1)[0]), host.holds(0, names(1)[0]), host.keeps(0, block)) == (None, block, False)
    host.wrote(0, int32([block]))
    assert (host.find(0, names(1)[0]), host.keeps(0, block)) == (block, True)


def test_a_pinned_block_makes_no_room_and_the_deepest_of_a_prefix_goes_first() -> None:
    host = host_blocks(5, (1,))
    blocks = filled(host, names(4))
    host.pin(0, int32(blocks[3:]))
    host.reserve(0, names(1, first=10))
    assert [host.find(0, name) is not None for name in names(4)] == [True, True, False, True]
    assert len(host.reserve(0, names(4, first=20))) == 2
    assert list(host.contents()[0]) == [names(4)[3]]


def test_what_is_void_is_never_found_whatever_is_written_later() -> None:
    host = host_blocks(5, (1,))
    blocks = host.reserve(0, names(1))
    host.void(0, int(blocks[0]))
    host.wrote(0, blocks)
    host.unpin(0, blocks)
    assert host.find(0, names(1)[0]) is None
    assert host.pool.empty == 4


def test_clearing_leaves_pinned_blocks_to_their_operations() -> None:
    host = host_blocks(5, (1,))
    filled(host, names(2))
    busy = host.reserve(0, names(1, first=9))
    host.clear()
    host.wrote(0, busy)
    host.unpin(0, busy)
    assert host.contents() == ({},)
    assert host.pool.empty == 4


@pytest.mark.contract("SP-35", "CT-4")
def test_operations_stand_in_the_order_of_execution_and_are_numbered_so() -> None:
    operations = Operations()
    tail = (GroupBlocks(blocks=(3,)),)
    one = int32([1])
    operations.add(Restore(slot=0, pages=(), tail=tail, image=0))
    operations.add(Load(group=0, host_blocks=one, device_blocks=one))
    operations.add(Store(group=0, device_blocks=one, host_blocks=one, ordered=False))
    operations.add(Snapshot(slot=1, tail=tail, image=1))
    operations.add(Store(group=0, device_blocks=one, host_blocks=one, ordered=True))
    operations.add(Snapshot(slot=2, tail=tail, image=2))
    ops = operations.take()
    assert [type(op).__name__ for op in ops] == [
        "WriteBackOp",
        "SnapshotBatch",
        "WriteBackOp",
        "LoadBackOp",
        "RestoreBatch",
    ]
    assert isinstance(ops[0], WriteBackOp)
    assert isinstance(ops[1], SnapshotBatch)
    assert (ops[0].op_id, ops[0].stream_ordered, [op.op_id for op in ops[1].ops]) == (1, True, [2, 3])
    assert operations.open == 6
    assert operations.take() == ()


@pytest.mark.contract("SP-16")
def test_an_acknowledgment_of_another_kind_or_number_is_passed_over() -> None:
    operations = Operations()
    operations.add(Store(group=0, device_blocks=EMPTY_INT32, host_blocks=EMPTY_INT32, ordered=True))
    operations.take()
    assert operations.done(CacheAcks(load_backs=(1,), write_backs=(2,), snapshots=(1,))) == []
    assert len(operations.done(CacheAcks(write_backs=(1, 1)))) == 1
    assert operations.open == 0


def tier_over(pool: Pool, *, host_parents: int = 1000) -> HostTier:
    return host_tier(WritePolicy.WRITE_THROUGH, pool, host_blocks(host_parents, (1,)), Operations())


def published(tier: HostTier, count: int) -> list[int]:
    blocks, _ = tier.pool.take(0, count)
    tier.pool.mark_findable(0, blocks)
    tier.published(0, blocks.tolist(), [block.to_bytes(4, "little") for block in blocks.tolist()])
    return blocks.tolist()


@pytest.mark.contract("CT-2")
def test_a_plan_stores_so_many_blocks_and_the_rest_follows() -> None:
    tier = tier_over(make_pool(600, (1,)))
    published(tier, STORED_PER_PLAN + 10)
    counts = []
    for _ in range(3):
        ops = tier.take_ops()
        counts.append(sum(len(op.device_blocks) for op in ops if isinstance(op, WriteBackOp)))
    assert counts == [STORED_PER_PLAN, 10, 0]


def test_an_idle_block_is_not_pinned_where_that_would_break_a_promise_but_stored_when_it_is_evicted() -> None:
    tier = tier_over(make_pool(4, (1,)))
    blocks = published(tier, 3)
    tier.pool.release(0, int32(blocks[1:]))
    tier.pool.promise(0, 2)
    (store,) = tier.take_ops()
    assert isinstance(store, WriteBackOp)
    assert store.device_blocks == (blocks[0],)
    tier.pool.redeem(0, 2)
    _, evicted = tier.pool.take(0, 1)
    (gone,) = evicted[0].blocks
    tier.evicting(0, gone, gone.to_bytes(4, "little"))
    stores = [op for op in tier.take_ops() if isinstance(op, WriteBackOp)]
    assert [(op.device_blocks, op.stream_ordered) for op in stores] == [((gone,), True), ((blocks[2],), False)]


def test_a_store_of_bytes_that_are_written_over_is_void() -> None:
    """A state that is kept no more goes on in the same block, under a store or before its turn."""
    tier = tier_over(make_pool(10, (1,)))
    first, second = published(tier, 2)
    tier.forgotten(0, second)
    (store,) = tier.take_ops()
    assert isinstance(store, WriteBackOp)
    assert store.device_blocks == (first,)
    tier.forgotten(0, first)
    tier.acked(CacheAcks(write_backs=(store.op_id,)))
    assert tier.find(0, first.to_bytes(4, "little")) is None
    assert tier.host.pool.active == 0
    assert (tier.pool.references(0, first), tier.open) == (1, 0)
