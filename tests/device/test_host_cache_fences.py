"""Each fence of the host tier, and the run that goes wrong without it.

In every scenario one stream is held until the stream behind the fence has either come to the fence or,
where the fence was left out, has done what it must not do yet. So neither outcome depends on time.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest
from device_doubles import batch, granted, seat
from host_rig import HostRig, host_rig, kv, layered_token

from tokenspeed.device.kv.host_cache import LoadWait
from tokenspeed.device.kv.host_fences import Fence
from tokenspeed.plane.plan import (
    GroupBlocks,
    LoadBackOp,
    SnapshotBatch,
    SnapshotOp,
    WriteBackOp,
)

A = [3, 1, 4, 1, 5, 9]
B = [2, 6, 5, 3, 5, 8]


def prefill(rig: HostRig, slot: int, prompt: list[int], blocks: tuple[int, ...]) -> int:
    landing = rig.submit(
        batch((slot, 0, prompt)),
        seats=(seat(slot),),
        grants=granted(*((slot, index, block) for index, block in enumerate(blocks))),
    )
    return landing.result().tokens[0]


def stored(rig: HostRig, block: int, host: int, *, op_id: int = 100) -> None:
    """`block`'s bytes are in the host tier, acknowledged."""
    rig.submit(cache=(WriteBackOp(op_id=op_id, group=0, device_blocks=(block,), host_blocks=(host,)),))
    assert rig.acked(1).write_backs == (op_id,)


def a_store_reads_what_the_forward_before_it_wrote(rig: HostRig) -> None:
    exec_stream = rig.backend.exec_stream
    exec_stream.hold()
    landing = rig.submit(batch((0, 0, A)), seats=(seat(0),), grants=granted((0, 0, 1), (0, 1, 2)))
    rig.submit(cache=(WriteBackOp(op_id=7, group=0, device_blocks=(1,), host_blocks=(3,)),))
    copies = rig.tier.open.state.copies
    rig.watch.until(lambda: Fence.STORE_AFTER_PLANS in rig.watch.notes or copies[0].event.query())
    exec_stream.release()
    landing.result()
    rig.acked(1)
    assert np.array_equal(rig.host(3), kv(A[:4]))


def an_image_is_the_victims_although_the_plan_gives_its_blocks_and_slot_away(rig: HostRig) -> None:
    token = prefill(rig, 0, A, (1, 2))
    rig.backend.write_stream.hold()
    landing = rig.submit(
        batch((0, 0, B), table_rows=[1]),
        seats=(seat(0, row=1),),
        grants=granted((0, 0, 1), (0, 1, 2)),
        pages_to_zero=(GroupBlocks(blocks=(1, 2)),),
        cache=(
            WriteBackOp(op_id=1, group=0, device_blocks=(1,), host_blocks=(3,), stream_ordered=True),
            SnapshotBatch(ops=(SnapshotOp(op_id=2, slot=0, tail=(GroupBlocks(blocks=(2,)),), image=1),)),
        ),
    )
    rig.watch.until(lambda: Fence.PLAN_AFTER_STORES in rig.watch.notes or landing.landed())
    rig.backend.write_stream.release()
    assert landing.result().tokens == [layered_token(B)]
    rig.acked(2)
    assert np.array_equal(rig.host(3), kv(A[:4]))
    assert np.array_equal(rig.image(1, 0), kv(A[4:]))
    if rig.tier.slots.slot_bytes:
        assert rig.tier.buffers.states[1].view(np.int64).tolist() == [token]


def a_load_arrives_after_its_target_was_zeroed(rig: HostRig) -> None:
    prefill(rig, 0, A, (1, 2))
    stored(rig, 1, 3)
    exec_stream = rig.backend.exec_stream
    exec_stream.hold()
    landing = rig.submit(
        batch((1, 4, A[4:])),
        seats=(seat(1),),
        grants=granted((1, 0, 5), (1, 1, 6)),
        pages_to_zero=(GroupBlocks(blocks=(5,)),),
        cache=(LoadBackOp(op_id=9, group=0, host_blocks=(3,), device_blocks=(5,)),),
    )
    copies = rig.tier.open.state.copies
    rig.watch.until(lambda: Fence.LOAD_AFTER_PLAN in rig.watch.notes or copies[0].event.query())
    exec_stream.release()
    assert landing.result().tokens == [layered_token(A)]


def a_forward_reads_what_its_plan_loads(rig: HostRig) -> None:
    prefill(rig, 0, A, (1, 2))
    stored(rig, 1, 3)
    rig.backend.load_stream.hold()
    landing = rig.submit(
        batch((1, 4, A[4:])),
        seats=(seat(1),),
        grants=granted((1, 0, 5), (1, 1, 6)),
        cache=(LoadBackOp(op_id=9, group=0, host_blocks=(3,), device_blocks=(5,)),),
    )
    forward_waits = {Fence.FORWARD_AFTER_LAYER, Fence.FORWARD_AFTER_LOAD}
    rig.watch.until(lambda: bool(forward_waits.intersection(rig.watch.notes)) or landing.landed())
    rig.backend.load_stream.release()
    assert landing.result().tokens == [layered_token(A)]


@attrs.frozen
class Scenario:
    run: Callable[[HostRig], None]
    load_wait: LoadWait = LoadWait.LAYERS


SCENARIOS = {
    Fence.STORE_AFTER_PLANS: Scenario(a_store_reads_what_the_forward_before_it_wrote),
    Fence.PLAN_AFTER_STORES: Scenario(an_image_is_the_victims_although_the_plan_gives_its_blocks_and_slot_away),
    Fence.LOAD_AFTER_PLAN: Scenario(a_load_arrives_after_its_target_was_zeroed),
    Fence.FORWARD_AFTER_LAYER: Scenario(a_forward_reads_what_its_plan_loads),
    Fence.FORWARD_AFTER_LOAD: Scenario(a_forward_reads_what_its_plan_loads, load_wait=LoadWait.WHOLE),
}
"""For each fence what must go wrong without it."""


def named(fence: Fence) -> str:
    return f"{fence.name}-{SCENARIOS[fence].run.__name__}"


@pytest.mark.contract("RA-27", "RA-28", "RA-29", "RA-35", "RA-36", "RA-37", "RA-43", "SP-45")
@pytest.mark.parametrize("executor", ["streams", "futures"])
@pytest.mark.parametrize("fence", Fence, ids=named)
def test_with_every_fence_in_place_bytes_and_tokens_are_right(fence: Fence, executor: str) -> None:
    scenario = SCENARIOS[fence]
    with host_rig(executor=executor, load_wait=scenario.load_wait) as rig:
        scenario.run(rig)
        assert fence in rig.watch.notes  # a stream did wait there


def wrong_without(fence: Fence, executor: str) -> str:
    """What goes wrong without it, in a line; "" if nothing does."""
    scenario = SCENARIOS[fence]
    with host_rig(executor=executor, load_wait=scenario.load_wait, without=fence) as rig:
        try:
            scenario.run(rig)
        except AssertionError as error:
            if fence in rig.watch.notes or "it never came" in str(error):
                raise
            return f"a wrong token or byte: {error}".splitlines()[0]
    return ""


@pytest.mark.parametrize("executor", ["streams", "futures"])
@pytest.mark.parametrize("fence", Fence, ids=named)
def test_without_a_fence_a_byte_or_a_token_is_wrong(fence: Fence, executor: str) -> None:
    """A fence that can be left out without a wrong answer is one that nobody needs, or that nobody tests."""
    assert wrong_without(fence, executor)
