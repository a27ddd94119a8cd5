"""The host tier over real streams: what is copied, in which order, who waits for whom, and what is acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
import pytest
from device_doubles import DECODE, CountingWakeup, background, batch, granted, plan, seat
from host_rig import LAYERS, SPECS, HostRig, host_rig, kv, layered_token, layered_tokens
from toy_rig import toy_rig

from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.handle import StreamDeviceHandle, cache_ops_from_plan
from tokenspeed.device.kv.host_cache import HostCacheExecutor, LoadWait
from tokenspeed.errors import DeviceLost, InvariantBroken
from tokenspeed.plane.plan import (
    BlockCopy,
    Dispatch,
    ExecutionPlan,
    GroupBlocks,
    HostPages,
    LoadBackOp,
    RestoreBatch,
    RestoreOp,
    SnapshotBatch,
    SnapshotOp,
    WriteBackOp,
)
from tokenspeed.plane.results import CacheAcks

OpenRig: TypeAlias = Callable[..., AbstractContextManager[HostRig]]

A = [3, 1, 4, 1, 5, 9]
B = [2, 6, 5, 3, 5, 8]


@pytest.fixture(params=["streams", "futures"])
def open_rig(request: pytest.FixtureRequest) -> OpenRig:
    """The same tests for both executors."""
    return partial(host_rig, executor=request.param)


def write_back(op_id: int, device: tuple[int, ...], host: tuple[int, ...], *, ordered: bool = False) -> WriteBackOp:
    return WriteBackOp(op_id=op_id, group=0, device_blocks=device, host_blocks=host, stream_ordered=ordered)


def load_back(op_id: int, host: tuple[int, ...], device: tuple[int, ...]) -> LoadBackOp:
    return LoadBackOp(op_id=op_id, group=0, host_blocks=host, device_blocks=device)


def snapshot(op_id: int, slot: int, blocks: tuple[int, ...], image: int) -> SnapshotBatch:
    return SnapshotBatch(ops=(SnapshotOp(op_id=op_id, slot=slot, tail=(GroupBlocks(blocks=blocks),), image=image),))


def restore(
    op_id: int, slot: int, image: int, tail: tuple[int, ...], host: tuple[int, ...] = (), device: tuple[int, ...] = ()
) -> RestoreBatch:
    op = RestoreOp(
        op_id=op_id,
        slot=slot,
        pages=(HostPages(host_blocks=host, device_blocks=device),),
        tail=(GroupBlocks(blocks=tail),),
        image=image,
    )
    return RestoreBatch(ops=(op,))


def prefill(rig: HostRig, slot: int, prompt: list[int], blocks: tuple[int, ...]) -> int:
    landing = rig.submit(
        batch((slot, 0, prompt)),
        seats=(seat(slot, prompt_len=len(prompt)),),
        grants=granted(*((slot, index, block) for index, block in enumerate(blocks))),
    )
    return landing.result().tokens[0]


def zeroing(*blocks: int) -> tuple[GroupBlocks, ...]:
    return (GroupBlocks(blocks=blocks),)


# ---- the parts -----------------------------------------------------------------------------------


@pytest.mark.contract("CT-6")
def test_one_executor_has_two_buffers_that_share_no_memory() -> None:
    with host_rig() as rig:
        buffers = rig.tier.buffers
        assert isinstance(rig.handle.host_tier, HostCacheExecutor)
        assert not np.shares_memory(buffers.l2, buffers.images)
        assert np.shares_memory(buffers.l2, buffers.blocks[0])
        assert np.shares_memory(buffers.images, buffers.tails[0])
        assert np.shares_memory(buffers.images, buffers.states) or not rig.tier.slots.slot_bytes


@pytest.mark.contract("CT-5")
def test_the_handle_has_the_same_operations_with_and_without_image_pool() -> None:
    def operations(handle: StreamDeviceHandle) -> list[str]:
        return [name for name in dir(handle) if not name.startswith("_")]

    with host_rig() as rig, host_rig(specs=attrs.evolve(SPECS, images=0)) as without, toy_rig() as bare:
        assert operations(rig.handle) == operations(without.handle) == operations(bare.handle)


@pytest.mark.contract("CT-3", "CT-4")
def test_block_copies_pass_the_adapter_unchanged_and_images_come_out_one_by_one() -> None:
    loads, stores = load_back(1, (3,), (7,)), write_back(2, (1,), (4,))
    images = SnapshotBatch(ops=tuple(snapshot(3 + i, i, (1,), i).ops[0] for i in range(3)))
    backs = RestoreBatch(ops=tuple(restore(6 + i, i, i, (1,)).ops[0] for i in range(2)))
    device = cache_ops_from_plan(ExecutionPlan(round_id=1, cache=(loads, images, stores, backs))).device
    assert device[0] is loads
    assert device[4] is stores
    assert device == (loads, *images.ops, stores, *backs.ops)


# ---- stores --------------------------------------------------------------------------------------


@pytest.mark.contract("RA-26", "RA-27", "RA-28", "RA-29")
def test_stores_that_must_read_old_bytes_are_next_to_each_other_and_end_in_one_wait(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        prefill(rig, 0, A, (1, 2))
        rig.log.clear()
        rig.submit(
            cache=(
                write_back(1, (4,), (5,)),
                write_back(2, (1,), (3,), ordered=True),
                snapshot(3, 0, (2,), 0),
            ),
            pages_to_copy=(BlockCopy(source=4, destination=6),),
            pages_to_zero=zeroing(1, 2),
        ).result()
    streams = [entry for entry in rig.log if entry != ("exec", "read")]
    assert streams == [
        ("exec", "fence"),
        ("write", "wait"),
        ("write", "write-back"),
        ("write", "snapshot"),
        ("exec", "wait"),
        ("write", "write-back"),
        ("exec", "copy"),
        ("exec", "zero"),
        ("exec", "fence"),
    ]


@pytest.mark.contract("RA-28", "CT-2")
def test_a_store_keeps_the_bytes_of_a_page_that_its_own_plan_gives_away(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        prefill(rig, 0, A, (1, 2))
        landing = rig.submit(
            batch((1, 0, B)),
            seats=(seat(1),),
            grants=granted((1, 0, 1), (1, 1, 2)),
            pages_to_zero=zeroing(1, 2),
            cache=(write_back(1, (1, 2), (4, 3), ordered=True),),
        )
        assert landing.result().tokens == [layered_token(B)]
        rig.acked(1)
        assert np.array_equal(rig.host(4), kv(A[:4]))
        assert np.array_equal(rig.host(3), kv(A[4:]))
        assert np.array_equal(rig.page(1), kv(B[:4]))


@pytest.mark.contract("RA-30")
def test_a_write_through_store_holds_up_nobody(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        token = prefill(rig, 0, A, (1, 2))
        rig.backend.write_stream.hold()
        landing = rig.submit(batch((0, len(A), [token])), cache=(write_back(1, (1,), (3,)),))
        assert landing.result().tokens == layered_tokens(A, 2)[1:]
        assert not rig.handle.poll_cache_results()
        rig.backend.write_stream.release()
        assert rig.acked(1) == CacheAcks(write_backs=(1,))
        assert np.array_equal(rig.host(3), kv(A[:4]))


# ---- loads ---------------------------------------------------------------------------------------


def away_and_back(rig: HostRig) -> None:
    """A's first block is in the host tier, and nowhere else."""
    prefill(rig, 0, A, (1, 2))
    rig.submit(cache=(write_back(100, (1,), (3,), ordered=True),), pages_to_zero=zeroing(1, 2)).result()
    rig.acked(1)


@pytest.mark.contract("CT-1", "RA-35", "RA-36")
def test_a_block_comes_back_and_gives_the_tokens_of_the_first_run(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        away_and_back(rig)
        rig.log.clear()
        landing = rig.submit(
            batch((1, 4, A[4:])),
            seats=(seat(1),),
            grants=granted((1, 0, 7), (1, 1, 8)),
            pages_to_zero=zeroing(7, 8),
            cache=(load_back(1, (3,), (7,)),),
        )
        assert landing.result().tokens == [layered_token(A)]
        assert np.array_equal(rig.page(7), kv(A[:4]))
        assert rig.acked(1) == CacheAcks(load_backs=(1,))
        assert rig.log[:6] == [
            ("exec", "zero"),
            ("exec", "fence"),
            ("load", "wait"),
            *(("load", f"load layer {layer}") for layer in range(LAYERS)),
        ]


@pytest.mark.contract("RA-36")
def test_a_forward_computes_the_layers_that_have_arrived_and_no_more(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        away_and_back(rig)
        rig.watch.notes.clear()
        load = rig.backend.load_stream
        load.stepped = True
        landing = rig.submit(
            batch((1, 4, A[4:])),
            seats=(seat(1),),
            grants=granted((1, 0, 7), (1, 1, 8)),
            cache=(load_back(1, (3,), (7,)),),
        )
        for layer in range(LAYERS):
            rig.watch.until(lambda layer=layer: ("asked", layer) in rig.watch.notes)
            computed = [note[1] for note in rig.watch.notes if isinstance(note, tuple) and note[0] == "computed"]
            assert computed == list(range(layer))
            assert not landing.landed()
            load.permits.release()
        assert landing.result().tokens == [layered_token(A)]


@pytest.mark.contract("RA-37")
def test_a_forward_that_cannot_stop_between_layers_begins_after_the_last(open_rig: OpenRig) -> None:
    with open_rig(load_wait=LoadWait.WHOLE) as rig:
        away_and_back(rig)
        rig.watch.notes.clear()
        load = rig.backend.load_stream
        load.stepped = True
        landing = rig.submit(
            batch((1, 4, A[4:])),
            seats=(seat(1),),
            grants=granted((1, 0, 7), (1, 1, 8)),
            cache=(load_back(1, (3,), (7,)),),
        )
        first, last = (load.inner.submit(lambda: None, "between"), rig.tier.open.state.copies[0].event)
        load.permits.release(LAYERS - 1)
        assert not last.query()
        assert not [note for note in rig.watch.notes if isinstance(note, tuple)]
        load.permits.release()
        first.wait()
        assert landing.result().tokens == [layered_token(A)]


@pytest.mark.contract("RA-38")
def test_a_plan_without_a_load_waits_for_none(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        away_and_back(rig)
        rig.submit(
            batch((1, 4, A[4:])),
            seats=(seat(1),),
            grants=granted((1, 0, 7), (1, 1, 8)),
            cache=(load_back(1, (3,), (7,)),),
        ).result()
        rig.watch.notes.clear()
        rig.backend.load_stream.hold()
        assert rig.submit(batch((1, len(A), DECODE))).result().tokens == layered_tokens(A, 2)[1:]
        assert not [note for note in rig.watch.notes if note[0] == "asked"]
        rig.backend.load_stream.release()


@pytest.mark.contract("RA-38")
def test_a_load_without_a_batch_is_there_before_the_next_plans_forward(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        away_and_back(rig)
        rig.backend.load_stream.hold()
        rig.watch.notes.clear()
        rig.submit(cache=(load_back(1, (3,), (7,)),))
        landing = rig.submit(batch((1, 4, A[4:])), seats=(seat(1),), grants=granted((1, 0, 7), (1, 1, 8)))
        rig.watch.until(lambda: ("asked", LAYERS - 1) in rig.watch.notes or landing.landed())
        rig.backend.load_stream.release()
        assert landing.result().tokens == [layered_token(A)]


# ---- images --------------------------------------------------------------------------------------


def retract(rig: HostRig, tokens: list[int]) -> None:
    """A's request in slot 0, blocks 1 to 3, leaves for the host; B takes its slot and blocks in the same plan."""
    full = len(tokens) // 4
    blocks = (1, 2, 3)
    landing = rig.submit(
        batch((0, 0, B), table_rows=[1]),
        seats=(seat(0, row=1, prompt_len=len(B)),),
        grants=granted((0, 0, 1), (0, 1, 2)),
        pages_to_zero=zeroing(1, 2, 3),
        cache=(
            write_back(11, blocks[:full], (5, 6)[:full], ordered=True),
            snapshot(12, 0, blocks[full : full + 1], 1),
        ),
    )
    assert landing.result().tokens == [layered_token(B)]
    assert rig.acked(2) == CacheAcks(write_backs=(11,), snapshots=(12,))


@pytest.mark.contract("CT-7", "RA-39", "RA-43", "SP-43", "SP-45")
@pytest.mark.parametrize("known", [False, True], ids=["from-device", "from-host"])
def test_a_retracted_request_goes_on_as_if_nothing_had_happened(open_rig: OpenRig, known: bool) -> None:
    expected = layered_tokens(A, 8)
    with open_rig() as rig:
        tokens = [prefill(rig, 0, A, (1, 2, 3))]
        for step in range(3):
            tokens += rig.submit(batch((0, len(A) + step, DECODE))).result().tokens
        written = len(A) + 3  # the last token's KV is not there yet
        retract(rig, (A + tokens)[:written])
        rig.log.clear()
        rig.submit(
            seats=(seat(2, row=0, prompt_len=len(A)),),
            grants=granted((2, 0, 9), (2, 1, 10), (2, 2, 11), (2, 3, 12)),
            cache=(restore(13, 2, 1, (11,), (5, 6), (9, 10)),),
        ).result()
        assert rig.acked(1) == CacheAcks(restores=(13,))
        assert [entry for entry in rig.log if entry[0] == "load"] == [("load", "wait"), ("load", "restore")]
        assert np.array_equal(rig.page(9), kv((A + tokens)[:4]))
        assert np.array_equal(rig.page(11), kv((A + tokens)[8:written]))
        for step in range(4):
            given = [tokens[-1]] if known and not step else DECODE
            tokens += rig.submit(batch((2, written + step, given), table_rows=[0])).result().tokens
    assert tokens == expected


@pytest.mark.contract("RA-39", "RA-40")
def test_no_forward_waits_for_a_restore(open_rig: OpenRig) -> None:
    with open_rig() as rig:
        tokens = [prefill(rig, 0, A, (1, 2, 3))]
        retract(rig, A)
        rig.backend.load_stream.hold()
        rig.watch.notes.clear()
        landing = rig.submit(
            batch((0, len(B), DECODE), table_rows=[1]),
            seats=(seat(2, row=0, prompt_len=len(A)),),
            grants=granted((2, 0, 9), (2, 1, 10)),
            cache=(restore(13, 2, 1, (10,), (5,), (9,)),),
        )
        assert landing.result().tokens == layered_tokens(B, 2)[1:]
        assert not [note for note in rig.watch.notes if isinstance(note, tuple) and note[0] == "asked"]
        assert not rig.handle.poll_cache_results()
        rig.backend.load_stream.release()
        assert rig.acked(1) == CacheAcks(restores=(13,))
        tokens += rig.submit(batch((2, len(A), DECODE), table_rows=[0])).result().tokens
    assert tokens == layered_tokens(A, 2)


@pytest.mark.contract("CT-4", "CT-12", "RA-39")
def test_a_batch_of_victims_is_acknowledged_one_by_one_and_each_once() -> None:
    with host_rig() as rig:
        for slot, blocks in enumerate(((1, 2), (3, 4), (5, 6))):
            prefill(rig, slot, A, blocks)
        victims = tuple(snapshot(20 + i, i, (2 + 2 * i,), i).ops[0] for i in range(3))
        writes = tuple(write_back(30 + i, (1 + 2 * i,), (1 + i,), ordered=True) for i in range(3))
        rig.submit(cache=(*writes, SnapshotBatch(ops=victims))).result()
        acks = rig.acked(6)
        assert sorted(acks.snapshots) == [20, 21, 22]
        assert sorted(acks.write_backs) == [30, 31, 32]
        backs = tuple(restore(40 + i, i, i, (8 + i,)).ops[0] for i in range(3))
        rig.log.clear()
        rig.submit(cache=(RestoreBatch(ops=backs), load_back(50, (1,), (12,)), load_back(51, (2,), (13,)))).result()
        acks = rig.acked(5)
        assert (sorted(acks.restores), sorted(acks.load_backs)) == ([40, 41, 42], [50, 51])
        assert [label for stream, label in rig.log if stream == "load"][-3:] == ["restore"] * 3
        assert not rig.handle.poll_cache_results()
        assert [rig.page(8 + i).tolist() for i in range(3)] == [kv(A[4:]).tolist()] * 3


# ---- waking, ending, failing ---------------------------------------------------------------------


@pytest.mark.contract("RA-7", "CT-12")
def test_the_end_of_a_held_copy_wakes_the_control_thread() -> None:
    wakeup = CountingWakeup()
    with host_rig() as rig:
        prefill(rig, 0, A, (1, 2))
        plane = open_data_plane(rig.handle, wakeup, Strict())
        rig.backend.write_stream.hold()
        plane.execute(plan()._replace(batch=None, cache=(write_back(1, (1,), (3,)),)), Dispatch())
        assert wakeup.wait_for(1)  # the plan itself has landed
        assert not plane.poll_cache_results()
        rig.backend.write_stream.release()
        assert wakeup.wait_for(2)
        assert plane.poll_cache_results() == CacheAcks(write_backs=(1,))
        plane.close()


def test_a_shutdown_waits_for_the_copies_that_are_queued_and_takes_no_more() -> None:
    with host_rig() as rig:
        prefill(rig, 0, A, (1, 2))
        rig.backend.write_stream.hold()
        rig.submit(cache=(write_back(1, (1,), (3,)),)).result()
        with background(rig.handle.shutdown_cache):
            rig.backend.write_stream.release()
        assert np.array_equal(rig.host(3), kv(A[:4]))
        assert rig.handle.poll_cache_results() == CacheAcks(write_backs=(1,))
        with pytest.raises(InvariantBroken, match="after its shutdown"):
            rig.submit(cache=(write_back(2, (1,), (3,)),))


def test_a_shutdown_does_not_wait_for_ever() -> None:
    with host_rig() as rig:
        rig.backend.write_stream.hold()
        rig.submit(cache=(write_back(1, (1,), (3,)),))
        with pytest.raises(DeviceLost, match="did not end within"):
            attrs.evolve(rig.tier, shutdown_s=0.05).shutdown()


def test_the_tier_is_cleared_at_rest_only() -> None:
    with host_rig() as rig:
        rig.handle.flush_cache()
        rig.backend.write_stream.hold()
        rig.submit(cache=(write_back(1, (1,), (3,)),))
        with pytest.raises(InvariantBroken, match="cleared under a copy"):
            rig.handle.flush_cache()


@attrs.frozen(eq=False)
class BrokenBlocks:
    """`BlockBytes` that fails from the given look on."""

    inner: object
    good: int
    looks: list[int] = attrs.field(factory=list)

    def layer_bytes(self, group: int) -> object:
        self.looks.append(group)
        if len(self.looks) > self.good:
            raise DeviceLost("planted in a copy")
        return self.inner.layer_bytes(group)


def break_copies(rig: HostRig, *, good: int) -> HostRig:
    tier = attrs.evolve(rig.tier, blocks=BrokenBlocks(rig.tier.blocks, good))
    return attrs.evolve(rig, tier=tier, handle=attrs.evolve(rig.handle, host_tier=tier))


def test_a_load_that_fails_halfway_ends_the_forward_with_its_error(open_rig: OpenRig) -> None:
    with open_rig() as whole:
        away_and_back(whole)
        rig = break_copies(whole, good=1)
        landing = rig.submit(
            batch((1, 4, A[4:])),
            seats=(seat(1),),
            grants=granted((1, 0, 7), (1, 1, 8)),
            cache=(load_back(1, (3,), (7,)),),
        )
        with pytest.raises(DeviceLost, match="planted in a copy"):
            landing.result()
        with pytest.raises(DeviceLost, match="planted in a copy"):
            rig.handle.poll_cache_results()


def test_a_load_that_never_runs_ends_the_forward_too(open_rig: OpenRig) -> None:
    """A restore has failed before, for which no forward waits; the stream skips all that follows."""
    with open_rig() as whole:
        prefill(whole, 0, A, (1, 2, 3))
        retract(whole, A)
        rig = break_copies(whole, good=0)
        rig.submit(cache=(restore(13, 2, 1, (10,), (5,), (9,)),)).result()
        landing = rig.submit(
            batch((1, 4, A[4:])),
            seats=(seat(1),),
            grants=granted((1, 0, 7), (1, 1, 8)),
            cache=(load_back(1, (5,), (7,)),),
        )
        with pytest.raises(DeviceLost, match="planted in a copy"):
            landing.result()


def test_a_store_that_fails_is_never_acknowledged_as_done() -> None:
    with host_rig() as whole:
        rig = break_copies(whole, good=0)
        rig.submit(cache=(write_back(1, (1,), (3,)),)).result()
        event = rig.tier.open.state.copies[0].event
        with pytest.raises(DeviceLost):
            event.wait()
        with pytest.raises(DeviceLost, match="planted in a copy"):
            rig.handle.poll_cache_results()


WRONG = {
    "a null host block": write_back(1, (1,), (0,)),
    "a null device block": write_back(1, (0,), (1,)),
    "a host block behind the tier": write_back(1, (1,), (9,)),
    "a device block behind the pool": load_back(1, (1,), (17,)),
    "two for one": load_back(1, (1, 2), (3,)),
    "another group": attrs.evolve(load_back(1, (1,), (3,)), group=1),
    "no such image": snapshot(1, 0, (1,), 3),
    "no such slot": snapshot(1, 4, (1,), 0),
    "more than an image holds": snapshot(1, 0, (1, 2, 3), 0),
    "a group twice": SnapshotBatch(
        ops=(SnapshotOp(op_id=1, slot=0, tail=(GroupBlocks(blocks=(1,)), GroupBlocks(blocks=(2,))), image=0),)
    ),
    "an empty image": restore(1, 0, 0, (1,)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_operation_that_cannot_be_right_breaks_an_invariant(wrong: str) -> None:
    with host_rig() as rig:
        with pytest.raises(InvariantBroken, match="op="):
            rig.submit(cache=(WRONG[wrong],))


def test_a_restore_wants_the_tail_that_its_image_holds() -> None:
    with host_rig() as rig:
        prefill(rig, 0, A, (1, 2))
        rig.submit(cache=(snapshot(1, 0, (1, 2), 0),)).result()
        with pytest.raises(InvariantBroken, match="does not hold this tail"):
            rig.submit(cache=(restore(2, 1, 0, (5,)),))
        rig.submit(cache=(restore(2, 1, 0, (5, 6)),)).result()
        rig.acked(2)
        assert np.array_equal(rig.page(5), kv(A[:4]))
