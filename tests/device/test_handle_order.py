"""The order of one plan's work inside `DeviceHandle.execute`, and the handle's other operations."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import attrs
import pytest
from device_doubles import DECODE, batch, granted, seat
from toy_rig import PAGE_TOKENS, toy_rig

from tokenspeed.device.gc_hooks import GcHooks
from tokenspeed.device.handle import CacheOps, StreamDeviceHandle, cache_ops_from_plan
from tokenspeed.device.step import AllReady, LayersReady
from tokenspeed.device.toy import NEVER_WRITTEN
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import (
    BlockCopy,
    ExecutionPlan,
    GroupBlocks,
    HostPages,
    LoadBackOp,
    RemoteStream,
    RestoreBatch,
    RestoreOp,
    SnapshotBatch,
    SnapshotOp,
    StorageOp,
    StorageVerb,
    WriteBackOp,
)
from tokenspeed.plane.ports import DeviceHandle, Wakeup
from tokenspeed.plane.results import CacheAcks

WRITE = WriteBackOp(op_id=1, group=0, device_blocks=(3,), host_blocks=(0,))
SNAPSHOT = SnapshotOp(op_id=2, slot=1, tail=(GroupBlocks(blocks=(4,)),), image=0)
LOAD = LoadBackOp(op_id=3, group=0, host_blocks=(1,), device_blocks=(5,))
RESTORE = RestoreOp(
    op_id=4,
    slot=1,
    pages=(HostPages(host_blocks=(2,), device_blocks=(6,)),),
    tail=(GroupBlocks(blocks=(8,)),),
    image=0,
)
SNAPSHOTS, RESTORES = SnapshotBatch(ops=(SNAPSHOT,)), RestoreBatch(ops=(RESTORE,))
PUT = StorageOp(op_id=5, verb=StorageVerb.PUT, keys=(b"key",))
REMOTE = RemoteStream(row=3, rid="r", slot=3, pages=(GroupBlocks(blocks=(7,)),))


@attrs.define(eq=False)
class ReadyOnCall:
    """`LayersReady` that notes when the forward waited on it."""

    log: list[tuple[str, str]]

    def wait_for(self, layer: int) -> None:
        self.log.append(("exec", f"layer {layer}"))


@attrs.define(eq=False)
class RecordingTier:
    """`HostTier` that writes into the streams' log and copies nothing."""

    log: list[tuple[str, str]] = attrs.field(factory=list)
    stored: list[tuple[object, ...]] = attrs.field(factory=list)
    loaded: list[tuple[object, ...]] = attrs.field(factory=list)

    def store(self, ops: tuple[object, ...]) -> None:
        self.stored.append(ops)
        self.log.extend(("write", "store") for _ in ops)

    def load(self, ops: tuple[object, ...]) -> LayersReady:
        self.loaded.append(ops)
        self.log.extend(("load", "load") for _ in ops)
        return ReadyOnCall(self.log) if ops else AllReady()

    def notify(self, wakeup: Wakeup) -> None:
        self.log.append(("host", "notify"))

    def acks(self) -> CacheAcks:
        return CacheAcks(write_backs=(1,))

    def flush(self) -> None:
        self.log.append(("host", "flush"))

    def memory(self) -> tuple:
        return ()

    def shutdown(self) -> None:
        self.log.append(("host", "shutdown"))


@attrs.define(eq=False)
class RecordingPeer:
    log: list[tuple[str, str]] = attrs.field(factory=list)

    def submit(self, prefill: tuple[RemoteStream, ...], decode: tuple[RemoteStream, ...]) -> None:
        self.log.extend(("peer", "prefill") for _ in prefill)
        self.log.extend(("peer", "decode") for _ in decode)


def test_it_is_a_device_handle() -> None:
    with toy_rig() as rig:
        assert isinstance(rig.handle, DeviceHandle)


@pytest.mark.contract("RA-25", "RA-26", "RA-31", "RA-32", "RA-34", "RA-35", "RA-38", "RA-41", "RA-42", "DP-42")
def test_a_plan_with_work_of_every_kind_is_submitted_in_the_contracts_order() -> None:
    tier, peer = RecordingTier(), RecordingPeer()
    with toy_rig(host_tier=tier, peer=peer) as rig:
        tier.log = peer.log = rig.log
        rig.hold()
        landing = rig.submit(
            batch((0, 0, [5])),
            seats=(seat(0),),
            grants=granted((0, 0, 1)),
            cache=(RESTORES, LOAD, PUT, SNAPSHOTS, WRITE),
            pages_to_copy=(BlockCopy(source=8, destination=9),),
            pages_to_zero=(GroupBlocks(blocks=(10,)),),
            remote_prefill=(REMOTE,),
            remote_decode=(REMOTE,),
        )
        # All was submitted while the device stood still: nothing of it waited for anything.
        assert rig.log == [
            ("write", "store"),
            ("write", "store"),
            ("exec", "copy"),
            ("exec", "zero"),
            ("load", "load"),
            ("load", "load"),
            ("peer", "prefill"),
            ("peer", "decode"),
            ("exec", "seat"),
            ("exec", "batch"),
        ]
        rig.release()
        landing.result()
        assert rig.log[-1] == ("exec", "layer 0")  # the batch waits on this plan's own load
        rig.log.clear()
        rig.submit(batch((0, 1, DECODE))).result()
        assert rig.log == [("exec", "batch")]  # and the next one, without a load, on none
    assert tier.stored == [(SNAPSHOT, WRITE), ()]
    assert tier.loaded == [(RESTORE, LOAD), ()]


@pytest.mark.contract("RA-24", "DP-53")
def test_cache_operations_become_two_tuples_of_frozen_values() -> None:
    plan = ExecutionPlan(round_id=1, cache=(WRITE, PUT, LOAD, SNAPSHOTS, RESTORES))
    ops = cache_ops_from_plan(plan)
    assert ops == CacheOps(device=(WRITE, LOAD, SNAPSHOT, RESTORE), storage=(PUT,))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ops.device = ()


@pytest.mark.contract("DP-53")
def test_copies_are_driven_by_the_operations_given_and_not_by_the_plan() -> None:
    tier = RecordingTier()
    with toy_rig(host_tier=tier) as rig:
        rig.submit(cache=(WRITE,), cache_ops=CacheOps(device=(LOAD,), storage=())).result()
    assert (tier.stored, tier.loaded) == ([()], [(LOAD,)])


@pytest.mark.contract("RA-32", "RA-34", "RA-42")
def test_copies_read_what_zeroing_wipes_and_the_batch_finds_both_done() -> None:
    prompt = list(range(1, PAGE_TOKENS + 1))
    with toy_rig() as rig:
        rig.submit(batch((0, 0, prompt)), seats=(seat(0),), grants=granted((0, 0, 1), (0, 1, 2))).result()
        alone = rig.submit(batch((0, PAGE_TOKENS, DECODE))).result()
        # Another request shares the prompt through a copy of block 1, which is wiped for a third in the same plan.
        shared = rig.submit(
            batch((1, PAGE_TOKENS, [rig.page(2)[0]])),
            seats=(seat(1),),
            grants=granted((1, 0, 11), (1, 1, 12)),
            pages_to_copy=(BlockCopy(source=1, destination=11),),
            pages_to_zero=(GroupBlocks(blocks=(1,)),),
        ).result()
        assert shared.tokens == alone.tokens
        assert rig.page(1) == [NEVER_WRITTEN] * PAGE_TOKENS
        assert rig.page(11) == prompt


@pytest.mark.contract("RA-31")
def test_copies_read_what_the_forwards_queued_before_them_write() -> None:
    with toy_rig() as rig:
        rig.hold()
        rig.submit(batch((0, 0, [4, 5, 6])), seats=(seat(0),), grants=granted((0, 0, 1)))
        copied = rig.submit(pages_to_copy=(BlockCopy(source=1, destination=9),))
        rig.release()
        copied.result()
        assert rig.page(9)[:3] == [4, 5, 6]


@pytest.mark.contract("DP-16")
@pytest.mark.parametrize(
    "work",
    [{"cache": (op,)} for op in (WRITE, SNAPSHOTS, LOAD, RESTORES)]
    + [{"remote_prefill": (REMOTE,)}, {"remote_decode": (REMOTE,)}],
    ids=["write-back", "snapshot", "load-back", "restore", "remote-prefill", "remote-decode"],
)
def test_work_for_a_part_that_was_not_built_breaks_an_invariant(work: dict[str, object]) -> None:
    with toy_rig() as rig, pytest.raises(InvariantBroken, match="without a"):
        rig.submit(**work)


@pytest.mark.contract("RA-24")
def test_a_storage_operation_never_reaches_the_device() -> None:
    with toy_rig() as rig, pytest.raises(InvariantBroken, match="unknown operation"):
        rig.submit(cache_ops=CacheOps(device=(PUT,), storage=()))


def test_acknowledgments_flush_and_shutdown_are_the_host_tiers() -> None:
    tier = RecordingTier()
    with toy_rig(host_tier=tier) as rig:
        assert rig.handle.poll_cache_results() == CacheAcks(write_backs=(1,))
        rig.handle.flush_cache()
        rig.handle.shutdown_cache()
        assert tier.log == [("host", "flush"), ("host", "shutdown")]
    with toy_rig() as rig:
        assert not rig.handle.poll_cache_results()
        rig.handle.flush_cache()
        rig.handle.shutdown_cache()
        rig.handle.idle_forward()
        assert rig.log == []


@pytest.mark.contract("RA-45", "DP-87")
def test_forwarded_rounds_reach_the_counter() -> None:
    hooks = GcHooks(interval=1000)
    with toy_rig(rounds=hooks) as rig:
        for _ in itertools.repeat(None, 60):
            rig.handle.note_forwarded()
    assert hooks.rounds.count == 60


@pytest.mark.contract("DP-33")
def test_nothing_of_a_built_handle_can_be_exchanged() -> None:
    with toy_rig() as rig:
        for field in attrs.fields(StreamDeviceHandle):
            with pytest.raises(attrs.exceptions.FrozenInstanceError):
                setattr(rig.handle, field.name, None)


def test_a_profile_is_a_chrome_trace_of_the_devices_work(tmp_path: Path) -> None:
    with toy_rig() as rig:
        assert rig.handle.stop_profile() == ""
        file = rig.handle.start_profile(str(tmp_path))
        assert rig.handle.start_profile(str(tmp_path)) == file
        rig.submit(batch((0, 0, [5, 6])), seats=(seat(0),), grants=granted((0, 0, 1))).result()
        assert rig.handle.stop_profile() == file
        names = {event.get("name") for event in json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]}
        assert "aten::sin" in names
        second = rig.handle.start_profile(str(tmp_path))
        assert second != file
        assert rig.handle.stop_profile() == second


def test_a_recording_that_still_runs_is_written_when_the_handle_closes(tmp_path: Path) -> None:
    with toy_rig() as rig:
        file = rig.handle.start_profile(str(tmp_path / "mine.json"))
        rig.submit(batch((0, 0, [5, 6])), seats=(seat(0),), grants=granted((0, 0, 1)))
        rig.handle.close()
    assert json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.contract("DP-16")
def test_a_profile_that_cannot_be_written_is_an_answer_and_not_an_exception(tmp_path: Path) -> None:
    file = tmp_path / "plain"
    file.write_text("a file, not a folder")
    with toy_rig() as rig:
        assert rig.handle.start_profile(str(file / "below")) == ""
        assert rig.handle.stop_profile() == ""
