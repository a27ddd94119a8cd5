"""Stream discipline: work may use other streams, if nothing it touches is used by a job that no wait orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import attrs
import pytest
import torch
from device_doubles import CountingWakeup, batch, checkpoint, cpu_backend, granted, plan, seat
from host_rig import HostRig, host_rig, layered_token
from native_rig import checkpoint_of, native_model, prompt
from paged_rows import paged_run

from tokenspeed.device.backends.base import DeviceBuffer, DeviceEvent
from tokenspeed.device.build import build_device_side
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.kv.host_fences import Fence
from tokenspeed.device.stream_order import OrderedBackend, Storage, checked_backend, checked_step, ordered
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import (
    Dispatch,
    GroupBlocks,
    HostPages,
    RestoreBatch,
    RestoreOp,
    SnapshotBatch,
    SnapshotOp,
)
from tokenspeed.settings.model import Backend, DeviceSettings, SchedulerSettings, Settings, SimulatedSettings

UNORDERED = "nothing puts one behind the other"


@attrs.frozen(eq=False)
class Shared:
    """A backend's streams, and a buffer and a workspace that jobs share."""

    backend: OrderedBackend
    buffer: DeviceBuffer
    workspace: Storage

    def on(self, stream: str, use: Callable[[], object], label: str = "job") -> DeviceEvent:
        return getattr(self.backend, f"{stream}_stream").submit(use, label)


@pytest.fixture
def shared() -> Iterator[Shared]:
    with cpu_backend() as inner:
        backend, made = ordered(inner), []
        event = backend.exec_stream.submit(lambda: made.append(backend.allocate((8,), torch.int64)), "allocate")
        event.wait()
        yield Shared(backend, made[0], Storage(name="workspace", order=backend.order))


def await_all(*events: DeviceEvent) -> None:
    for event in events:
        event.wait()


@pytest.mark.contract("DP-24")
def test_calls_of_one_stream_share_their_workspace_and_calls_of_two_do_not(shared: Shared) -> None:
    shared.on("exec", shared.workspace.use, "first forward")
    shared.on("exec", shared.workspace.use, "second forward").wait()
    beside = shared.on("load", shared.workspace.use, "copy")
    shared.on("exec", shared.workspace.use, "third forward")
    with pytest.raises(InvariantBroken, match=UNORDERED) as caught:
        await_all(beside, shared.on("exec", lambda: None))
    assert "'copy' of stream load" in str(caught.value)
    assert "'third forward' of stream exec" in str(caught.value)
    assert "workspace" in str(caught.value)


@pytest.mark.contract("DP-23", "DP-25")
def test_work_beside_may_touch_what_is_its_own(shared: Shared) -> None:
    """FIFO orders who submits; it does not promise one stream."""
    events = []
    for _ in range(5):
        events.append(shared.on("exec", lambda: shared.buffer.unwrap((0, 1, 2))))
        events.append(shared.on("write", lambda: shared.buffer.unwrap((5,))))
        events.append(shared.on("load", lambda: shared.buffer.unwrap((6, 7))))
    await_all(*events)


@pytest.mark.contract("DP-23", "DP-25")
def test_work_beside_may_touch_what_is_shared_behind_a_wait(shared: Shared) -> None:
    before = shared.on("exec", shared.buffer.unwrap)
    shared.backend.load_stream.wait(before)
    between = shared.on("load", partial(shared.buffer.unwrap, (3,)))
    shared.backend.exec_stream.wait(between)
    shared.on("exec", shared.buffer.unwrap).wait()


@pytest.mark.contract("DP-25")
def test_a_fork_that_joins_late_is_found_although_it_joins(shared: Shared) -> None:
    fork = shared.on("exec", lambda: None, "fork")
    shared.backend.load_stream.wait(fork)
    side = shared.on("load", partial(shared.buffer.unwrap, (3,)), "side work")
    shared.on("exec", partial(shared.buffer.unwrap, (3, 4)), "forward")
    shared.backend.exec_stream.wait(side)
    joined = shared.on("exec", shared.buffer.unwrap, "joined")
    with pytest.raises(InvariantBroken, match=UNORDERED):
        await_all(side, joined)


def test_a_wait_orders_what_is_submitted_after_it_and_nothing_else(shared: Shared) -> None:
    first = shared.on("exec", shared.workspace.use)
    shared.on("write", lambda: None)
    shared.backend.write_stream.wait(first)
    through = shared.on("write", lambda: None)
    shared.backend.load_stream.wait(through)  # by way of a third stream
    shared.on("load", shared.workspace.use).wait()


def test_what_the_host_has_seen_ended_comes_before_what_it_submits_then(shared: Shared) -> None:
    shared.on("load", shared.workspace.use).wait()
    ended = shared.on("exec", shared.workspace.use)
    ended.wait()
    assert ended.query()
    shared.on("write", shared.workspace.use).wait()


def test_a_missing_wait_is_found_although_the_jobs_ran_one_after_the_other(shared: Shared) -> None:
    """The first has long ended; the host has not asked."""
    first = shared.on("exec", shared.workspace.use)
    woken = CountingWakeup()
    first.notify(woken)
    assert woken.wait_for(1)
    with pytest.raises(InvariantBroken, match=UNORDERED):
        shared.on("load", shared.workspace.use).wait()


# ---- in the engine -----------------------------------------------------------------------------


A, B = [3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]


def retracted_and_restored(rig: HostRig) -> None:
    """A leaves its slot to B and comes back in another slot, which C has left; the host waits at the end only."""
    grants = granted((0, 0, 1), (0, 1, 2), (2, 0, 9), (2, 1, 10))
    seats = (seat(0), seat(2, prompt_len=len(A)))
    rig.submit(batch((0, 0, A), (2, 0, B)), seats=seats, grants=grants)
    rig.handle.release((2,), (2,))
    tail = (GroupBlocks(blocks=(2,)),)
    first = rig.submit(
        batch((0, 0, B), table_rows=[1]),
        seats=(seat(0, row=1, prompt_len=len(B)),),
        grants=granted((0, 0, 3), (0, 1, 4)),
        cache=(SnapshotBatch(ops=(SnapshotOp(op_id=2, slot=0, tail=tail, image=1),)),),
    )
    second = rig.submit(
        seats=(seat(2, row=0, prompt_len=len(A)),),
        grants=granted((2, 0, 11), (2, 1, 12)),
        cache=(
            RestoreBatch(
                ops=(
                    RestoreOp(
                        op_id=3,
                        slot=2,
                        pages=(HostPages(host_blocks=(), device_blocks=()),),
                        tail=(GroupBlocks(blocks=(12,)),),
                        image=1,
                    ),
                )
            ),
        ),
    )
    assert first.result().tokens == [layered_token(B)]
    second.result()
    rig.acked(2)


@pytest.mark.contract("DP-23", "DP-25")
def test_images_go_and_come_on_streams_of_their_own_in_order() -> None:
    with host_rig(checked=True) as rig:
        retracted_and_restored(rig)


@pytest.mark.contract("DP-25")
@pytest.mark.parametrize("without", [Fence.STORE_AFTER_PLANS, Fence.PLAN_AFTER_STORES, Fence.LOAD_AFTER_PLAN])
def test_each_wait_of_the_host_tier_is_missed_whatever_the_streams_do(without: Fence) -> None:
    with host_rig(checked=True, without=without) as rig:
        with pytest.raises(InvariantBroken, match=UNORDERED):
            retracted_and_restored(rig)


@pytest.mark.contract("DP-24")
def test_the_scratch_of_the_native_step_belongs_to_one_streams_order() -> None:
    model = native_model(checkpoint_of("tiny-llama"))
    with cpu_backend() as inner:
        backend = ordered(inner)
        run = paged_run(checked_step(model.step, backend), num_pages=8, page_tokens=8)
        works = [partial(run.forward, [(run.sequence(prompt(5, seed=i)), 5)]) for i in range(3)]
        for work in works[:2]:
            backend.exec_stream.submit(work, "forward")
        with pytest.raises(InvariantBroken, match="scratch of the step"):
            await_all(
                backend.load_stream.submit(works[2], "forward elsewhere"),
                backend.exec_stream.submit(lambda: None, "last"),
            )


def test_it_is_on_where_the_captures_are_checked_and_costs_nothing_elsewhere() -> None:
    model = native_model(checkpoint_of("tiny-llama"))
    with cpu_backend() as inner:
        assert checked_backend(inner, {}) is inner
        assert checked_step(model.step, inner) is model.step
        assert isinstance(checked_backend(inner, {"TOKENSPEED_CAPTURE_CHECK": "1"}), OrderedBackend)


def test_a_build_is_checked_on_the_simulated_device_too() -> None:
    settings = Settings(
        device=DeviceSettings(backend=Backend.SIMULATED),
        simulated=SimulatedSettings(step_ms=0.0),
        scheduler=SchedulerSettings(max_num_seqs=8, max_batched_tokens=64, chunk_tokens=64),
    )
    made = build_device_side(settings, checkpoint())
    plane = open_data_plane(made.handle, CountingWakeup())
    try:
        assert isinstance(made.handle.backend, OrderedBackend)
        work = plan(1, batch((2, 0, [3, 1, 4])), grants=granted((2, 0, 3)))
        assert len(plane.commit(plane.execute(work, Dispatch(seats=(seat(2),)))).tokens) == 1
    finally:
        plane.close()
