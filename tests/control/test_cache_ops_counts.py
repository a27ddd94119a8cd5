"""The count of open cache operations: what raises it, what lowers it, and when members ask each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs
import pytest
from device_doubles import CountingWakeup, FakeHandle

from tokenspeed.control.cache_ops import CacheOps, Unaccounted
from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.plane.plan import (
    Dispatch,
    ExecutionPlan,
    GroupBlocks,
    LoadBackOp,
    RestoreBatch,
    RestoreOp,
    SnapshotBatch,
    SnapshotOp,
    StorageOp,
    StorageVerb,
    WriteBackOp,
)
from tokenspeed.plane.results import CacheAcks
from tokenspeed.testing import ScriptedPlane, memory_mesh

TAIL = (GroupBlocks(blocks=(1,)),)


def writes(*ids: int) -> ExecutionPlan:
    ops = tuple(WriteBackOp(op_id=i, group=0, device_blocks=(i,), host_blocks=(i,)) for i in ids)
    return ExecutionPlan(round_id=1, cache=ops)


def polling(plan: ExecutionPlan, *acks: CacheAcks) -> tuple[CacheOps, ScriptedPlane]:
    plane, ops = ScriptedPlane(), CacheOps(mesh=memory_mesh(1)[0])
    plane.acks.extend(acks)
    ops.note(plan)
    return ops, plane


@pytest.mark.contract("CT-13")
def test_a_repeat_in_one_poll_is_counted_and_then_left_out() -> None:
    ops, plane = polling(writes(1, 2, 3), CacheAcks(write_backs=(1, 1)))
    assert ops.poll(plane) == CacheAcks(write_backs=(1,))
    assert ops.open == 1  # two operations are open: the count is off by one


@pytest.mark.contract("CT-14")
def test_a_repeat_is_found_out_at_once_when_nothing_else_is_open() -> None:
    ops, plane = polling(writes(1), CacheAcks(write_backs=(1, 1)))
    with pytest.raises(Unaccounted, match="more cache acknowledgments"):
        ops.poll(plane)


@pytest.mark.contract("CT-14")
def test_a_repeat_is_found_out_when_the_rest_lands() -> None:
    ops, plane = polling(writes(1, 2, 3), CacheAcks(write_backs=(1, 1)), CacheAcks(write_backs=(2, 3)))
    ops.poll(plane)
    with pytest.raises(Unaccounted):
        ops.poll(plane)


@pytest.mark.contract("CT-15")
def test_a_repeat_can_end_the_polling_before_the_last_operation_has() -> None:
    """Why the device side must acknowledge each operation once."""
    ops, plane = polling(writes(1, 2), CacheAcks(write_backs=(1,)), CacheAcks(write_backs=(1,)))
    ops.poll(plane)
    ops.poll(plane)
    assert ops.open == 0
    plane.acks.append(CacheAcks(write_backs=(2,)))
    assert not ops.poll(plane)
    assert list(plane.acks) == [CacheAcks(write_backs=(2,))]  # unnoticed


@pytest.mark.contract("CT-16")
def test_what_is_counted_is_what_the_device_side_is_given() -> None:
    snapshots = tuple(SnapshotOp(op_id=10 + i, slot=i, tail=TAIL, image=i) for i in range(3))
    restores = tuple(RestoreOp(op_id=20 + i, slot=i, pages=(), tail=TAIL, image=i) for i in range(2))
    plan = ExecutionPlan(
        round_id=1,
        cache=(
            *writes(1, 2).cache,
            StorageOp(op_id=3, verb=StorageVerb.PUT, keys=(b"k",)),
            SnapshotBatch(ops=snapshots),
            LoadBackOp(op_id=4, group=0, host_blocks=(1,), device_blocks=(2,)),
            RestoreBatch(ops=restores),
        ),
    )
    ops, handle = CacheOps(mesh=memory_mesh(1)[0]), FakeHandle()
    handle.gate.set()
    ops.note(plan)
    plane = open_data_plane(handle, CountingWakeup(), Strict())
    plane.execute(plan, Dispatch())
    plane.close()
    given = next(arguments[2] for _, operation, arguments in handle.log if operation == "execute")
    assert [op.op_id for op in given] == [1, 2, 10, 11, 12, 4, 20, 21]
    assert ops.open == len(given)


@attrs.define(eq=False)
class CountedMesh:
    """A member's `Mesh` that counts what it is asked."""

    inner: object
    gathers: int = 0

    @property
    def size(self) -> int:
        return self.inner.size

    def gather(self, value: object) -> tuple[object, ...]:
        self.gathers += 1
        return self.inner.gather(value)


def on_members(count: int, work: Callable[[int], object]) -> list[object]:
    results: dict[int, object] = {}
    threads = [threading.Thread(target=lambda r=rank: results.update({r: work(r)})) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[rank] for rank in range(count)]


@pytest.mark.contract("CT-10", "CT-11")
def test_members_ask_each_other_while_something_is_open_and_only_then() -> None:
    mesh = memory_mesh(2)

    def work(rank: int) -> tuple[list[int], list[int]]:
        plane, counted = ScriptedPlane(), CountedMesh(mesh[rank])
        if rank == 0:
            plane.acks.extend([CacheAcks(write_backs=(1,)), CacheAcks(write_backs=(2,)), CacheAcks()])
        else:  # nothing of its own until the third poll
            plane.acks.extend([CacheAcks(), CacheAcks(), CacheAcks(write_backs=(1, 2))])
        ops, gathers, counts = CacheOps(mesh=counted), [], []
        for round_id in range(6):
            if round_id == 1:
                ops.note(writes(1, 2))
            ops.poll(plane)
            gathers.append(counted.gathers)
            counts.append(ops.open)
        return gathers, counts

    assert on_members(2, work) == [([0, 1, 2, 3, 3, 3], [0, 2, 2, 0, 0, 0])] * 2
