"""Storage reports of several members become one tick, the same everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.control.l3 import AgreedStorage
from tokenspeed.errors import DeviceLost, InvariantBroken
from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.ports import StorageExecutor
from tokenspeed.plane.results import StorageDone, StorageTick
from tokenspeed.testing import memory_mesh
from tokenspeed.testing.storage import ScriptedStorage

T = TypeVar("T")


def members(count: int) -> tuple[list[ScriptedStorage], list[AgreedStorage]]:
    executors = [ScriptedStorage() for _ in range(count)]
    meshes = memory_mesh(count)
    return executors, [AgreedStorage(mesh=mesh, workers=own) for mesh, own in zip(meshes, executors, strict=True)]


def together(calls: list[Callable[[], T]]) -> list[T | BaseException]:
    """What each call returned or raised; the calls run side by side."""
    results: list[T | BaseException] = [InvariantBroken("no result")] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except Exception as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


def ticks(all_l3: list[AgreedStorage], *, forward: bool = True) -> list[StorageTick | BaseException]:
    return together([lambda l3=l3: l3.agree(forward=forward) for l3 in all_l3])  # type: ignore[misc]


def get(op_id: int, keys: int = 1) -> StorageOp:
    return StorageOp(
        op_id=op_id,
        verb=StorageVerb.GET,
        keys=tuple(bytes([at]) for at in range(keys)),
        host_blocks=tuple(range(1, keys + 1)),
    )


def submit_everywhere(all_l3: list[AgreedStorage], *ops: StorageOp) -> None:
    for l3 in all_l3:
        l3.submit(ops)


@pytest.mark.contract("PT-22", "CT-28", "CT-29")
def test_reports_become_one_tick_with_the_first_members_clock_and_the_worst_pressure() -> None:
    executors, all_l3 = members(3)
    for at, executor in enumerate(executors):
        executor.now_s = 10.0 + at
        executor.pressure = (0.2, 0.9, 0.5)[at]
    for forward in (True, False):
        assert (
            ticks(all_l3, forward=forward)
            == [StorageTick(forward=forward, storage=forward, now_s=10.0, pressure=0.9)] * 3
        )


@pytest.mark.contract("PT-22", "CT-30")
def test_an_operation_completes_once_each_owner_has_reported_it() -> None:
    executors, all_l3 = members(2)
    submit_everywhere(all_l3, get(1))
    executors[0].finish(1, True)
    for _ in range(3):
        assert ticks(all_l3) == [StorageTick(storage=True)] * 2
    executors[1].finish(1, True)
    done = StorageTick(storage=True, completed=(StorageDone(op_id=1, outcomes=(True,)),))
    assert ticks(all_l3) == [done] * 2
    assert ticks(all_l3) == [StorageTick(storage=True)] * 2


@pytest.mark.contract("CT-31")
def test_a_key_succeeded_if_all_owners_say_so_and_retired_it() -> None:
    executors, all_l3 = members(2)
    submit_everywhere(all_l3, get(7, keys=3), get(8))
    executors[0].finish(7, True, True, False)
    executors[1].finish(7, True, False, True)
    executors[0].finish(8, True)  # the other owner has not retired it
    want = StorageTick(storage=True, completed=(StorageDone(op_id=7, outcomes=(True, False, False)),))
    assert ticks(all_l3) == [want] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_an_operation_that_one_owner_gave_up_is_cancelled_once_the_other_has_ended_it_too(first: int) -> None:
    executors, all_l3 = members(2)
    submit_everywhere(all_l3, get(1), get(2))
    executors[first].cancel(2)
    assert ticks(all_l3) == [StorageTick(storage=True)] * 2
    executors[1 - first].finish(2, True)
    assert ticks(all_l3) == [StorageTick(storage=True, cancelled=(2,))] * 2


@pytest.mark.contract("CT-32")
@pytest.mark.parametrize("bad", [0, 1])
def test_an_invalid_report_fails_all_members_behind_the_same_exchange(bad: int) -> None:
    executors, all_l3 = members(2)
    executors[bad].error = "the disk is gone"
    first, second = ticks(all_l3)
    assert isinstance(first, DeviceLost)
    assert isinstance(second, DeviceLost)
    assert str(first) == str(second) == f"the storage executor failed: member {bad}: the disk is gone"


class Breaking(ScriptedStorage):
    def report(self) -> object:  # type: ignore[override]
        raise OSError("no such device")


@pytest.mark.contract("CT-32")
def test_an_executor_that_raises_in_its_poll_is_an_invalid_report() -> None:
    l3 = AgreedStorage(mesh=SoloMesh(), workers=Breaking())
    with pytest.raises(DeviceLost, match="member 0: OSError: no such device"):
        l3.agree(forward=True)


def test_completions_come_in_the_order_of_their_ids_and_each_once() -> None:
    executor = ScriptedStorage()
    assert isinstance(executor, StorageExecutor)
    l3 = AgreedStorage(mesh=SoloMesh(), workers=executor)
    l3.submit([get(3), get(4), StorageOp(op_id=3, verb=StorageVerb.CANCEL, keys=())])
    executor.finish(4, True)
    executor.finish(3, False)
    assert [done.op_id for done in l3.agree(forward=True).completed] == [3, 4]
    executor.completed.append(StorageDone(op_id=4, outcomes=(True,)))
    with pytest.raises(InvariantBroken, match="was not open"):
        l3.agree(forward=True)


@pytest.mark.contract("CP-38")
@pytest.mark.parametrize("bad", [0, 1])
def test_a_deletion_that_fails_on_one_member_is_everybodys_refusal(bad: int) -> None:
    executors, all_l3 = members(2)
    executors[bad].refusals = ["storage: no"]
    assert together([l3.clear for l3 in all_l3]) == ["storage: no"] * 2
    assert together([l3.clear for l3 in all_l3]) == [""] * 2


@pytest.mark.contract("CP-39")
def test_a_deployment_that_clears_asks_no_other_one_over_the_same_store() -> None:
    executors, mine = members(2)
    others, _ = members(2)
    for executor in others:
        executor.stored = executors[0].stored  # one store, one tenant
    executors[0].stored.add(b"page")
    # The others' mesh is not called: nobody is there to answer, and this would hang.
    assert together([l3.clear for l3 in mine]) == [""] * 2
    assert others[0].stored == set()
