"""`HostDataPlane`: one queue, one forward thread, the two waits of a commit, errors, closing."""

from __future__ import annotations

import gc
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import numpy as np
import pytest
from device_doubles import TIMEOUT_S, CountingWakeup, FakeHandle, background, batch, plan

from tokenspeed.device import data_plane
from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import THREAD_NAME, HostDataPlane, open_data_plane
from tokenspeed.device.handle import CacheOps, cache_ops_from_plan
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.operations import DiskWeights, WeightsGroup
from tokenspeed.plane.plan import Dispatch, ExecutionPlan, GroupBlocks, StorageOp, StorageVerb, WriteBackOp
from tokenspeed.plane.ports import DataPlane, DeviceHandle, Ticket
from tokenspeed.plane.results import CacheAcks

AWAITED = {
    "idle_forward": (),
    "flush_cache": (),
    "release_memory": (("weights", "kv_cache"),),
    "resume_memory": (("weights",), True),
    "load_weights": (DiskWeights(path="there"),),
    "commit_weights": (True,),
    "open_weights_group": (WeightsGroup(name="g", address="127.0.0.1:1", rank=1, size=2),),
    "close_weights_group": ("g",),
    "start_profile": ("here",),
    "stop_profile": (),
    "shutdown_cache": (),
}


@attrs.frozen(eq=False)
class Opened:
    plane: HostDataPlane
    handle: FakeHandle
    wakeup: CountingWakeup

    def execute(self, round_id: int = 1, **streams: object) -> Ticket:
        return self.plane.execute(plan(round_id, **streams), Dispatch())


@contextmanager
def opened(*, shut: bool = False, **handle_state: object) -> Iterator[Opened]:
    handle, wakeup = FakeHandle(**handle_state), CountingWakeup()
    if not shut:
        handle.gate.set()
    plane = open_data_plane(handle, wakeup, check=Strict())
    try:
        yield Opened(plane, handle, wakeup)
    finally:
        handle.gate.set()
        for landing in handle.landings:
            landing.copied.set()
        with suppress(ZeroDivisionError):
            plane.close()


def test_it_is_a_data_plane_and_the_double_is_a_handle() -> None:
    with opened() as device:
        assert isinstance(device.plane, DataPlane)
        assert isinstance(device.handle, DeviceHandle)


@pytest.mark.contract("PT-5", "DP-2")
def test_operations_run_on_the_forward_thread_one_after_another_in_the_order_of_queueing() -> None:
    with opened(shut=True) as device:
        wanted = []
        for i in range(50):
            if i % 3 == 0:
                device.execute(i)
                wanted.append("execute")
            elif i % 3 == 1:
                device.plane.release((i,), (-1,))
                wanted.append("release")
            else:
                device.plane.note_forwarded()
                wanted.append("note_forwarded")
        device.handle.gate.set()
        device.plane.idle_forward()
        wanted.append("idle_forward")
        assert device.handle.operations == wanted
        assert {thread for thread, _, _ in device.handle.log} == {THREAD_NAME}
        assert [edge for _, edge in device.handle.intervals] == ["begin", "end"] * len(wanted)
        assert [args[0].round_id for _, name, args in device.handle.log if name == "execute"] == list(range(0, 50, 3))


@pytest.mark.contract("PT-5", "PT-6")
def test_there_is_one_forward_thread_and_closing_joins_it() -> None:
    with opened() as device:
        device.execute()
        assert [t.name for t in threading.enumerate()].count(THREAD_NAME) == 1
    assert THREAD_NAME not in [t.name for t in threading.enumerate()]
    assert device.handle.operations[-1] == "close"
    assert device.handle.log[-1][0] == THREAD_NAME


@pytest.mark.contract("DP-3", "DP-13", "PT-14")
def test_queueing_returns_while_the_forward_thread_is_blocked() -> None:
    with opened(shut=True) as device:
        tickets = [device.execute(i) for i in range(3)]
        device.plane.release((1,), (0,))
        device.plane.note_forwarded()
        # Reaching this line is the point: the forward thread has not finished a single operation.
        assert device.handle.log == []
        assert tickets == [1, 2, 3]


@pytest.mark.contract("DP-4")
@pytest.mark.parametrize("operation", AWAITED)
def test_an_awaited_operation_returns_when_it_has_run_with_its_answer(operation: str) -> None:
    with opened(shut=True) as device:
        answers: list[object] = []
        with background(lambda: answers.append(getattr(device.plane, operation)(*AWAITED[operation]))):
            assert device.handle.entered.wait(TIMEOUT_S)
            assert answers == []
            device.handle.gate.set()
        silent = ("idle_forward", "flush_cache", "shutdown_cache")
        named = {"start_profile": "here/trace.json", "stop_profile": "trace.json"}
        expected = None if operation in silent else named.get(operation, "")
        assert answers == [expected]
        assert device.handle.operations == [operation]


@pytest.mark.contract("DP-15")
def test_what_is_queued_behind_a_wake_begins_when_the_whole_of_it_has_ended() -> None:
    with opened(shut=True) as device:
        with background(lambda: device.plane.resume_memory(("weights", "kv_cache"), True)):
            assert device.handle.entered.wait(TIMEOUT_S)
            ticket = device.execute()
            device.plane.release((1,), (1,))
            assert device.handle.intervals == [("resume_memory", "begin")]
            device.handle.gate.set()
        device.plane.commit(ticket)
        device.plane.idle_forward()
        wanted = ["resume_memory", "execute", "release", "idle_forward"]
        assert device.handle.intervals == [(operation, edge) for operation in wanted for edge in ("begin", "end")]


@pytest.mark.contract("DP-8", "DP-9", "DP-10", "PT-4")
def test_completion_queries_answer_on_the_calling_thread_while_a_launch_is_blocked() -> None:
    acks = CacheAcks(write_backs=(7,))
    with opened(shut=True, acks=acks) as device:
        ticket = device.execute()
        assert device.handle.entered.wait(TIMEOUT_S)
        assert device.plane.poll_cache_results() == acks
        assert device.plane.landed(ticket) is False
        assert device.handle.log == [(threading.current_thread().name, "poll_cache_results", ())]


@pytest.mark.contract("DP-9")
def test_the_marked_methods_are_the_completion_queries() -> None:
    marked = {name for name, method in vars(HostDataPlane).items() if getattr(method, "__completion_query__", False)}
    assert marked == {"landed", "poll_cache_results"}


@pytest.mark.contract("DP-11")
def test_a_commit_waits_for_the_launch_and_then_for_the_landing() -> None:
    with opened(shut=True, held_landing=True) as device:
        ticket, results = device.execute(41), []
        with background(lambda: results.append(device.plane.commit(ticket))):
            assert device.handle.entered.wait(TIMEOUT_S)
            assert device.handle.landings == []  # the first wait: not launched
            device.handle.gate.set()
            assert wait_until(lambda: device.handle.landings and device.handle.landings[0].waiting.is_set())
            assert results == []  # the second wait: launched, not landed
            device.handle.landings[0].land()
        assert [result.tokens for result in results] == [[41]]


def wait_until(condition: typing.Callable[[], object]) -> bool:
    """For conditions set by a thread that tells nobody."""
    pause = threading.Event()
    return any(condition() or pause.wait(0.005) for _ in range(2000)) and bool(condition())


@pytest.mark.contract("DP-11")
def test_landed_is_true_exactly_when_a_commit_would_not_wait() -> None:
    with opened(held_landing=True) as device:
        ticket = device.execute()
        device.plane.idle_forward()
        assert device.plane.landed(ticket) is False
        device.handle.landings[0].land()
        assert device.plane.landed(ticket) is True
        assert device.plane.commit(ticket).tokens == [1]


@pytest.mark.contract("RA-7")
def test_the_wakeup_is_set_when_a_forward_lands() -> None:
    with opened(held_landing=True) as device:
        device.execute()
        device.plane.idle_forward()
        assert device.wakeup.count == 0
        device.handle.landings[0].land()
        assert device.wakeup.wait_for(1)


def test_commits_are_in_order_and_each_once() -> None:
    with opened() as device:
        first, second = device.execute(), device.execute()
        with pytest.raises(InvariantBroken, match="out of order"):
            device.plane.commit(second)
        device.plane.commit(first)
        with pytest.raises(InvariantBroken, match="out of order"):
            device.plane.commit(first)
        device.plane.commit(second)
        with pytest.raises(InvariantBroken, match="not in flight"):
            device.plane.landed(second)


def test_a_plan_without_a_batch_has_nothing_to_commit() -> None:
    with opened() as device:
        plane = device.plane
        work = ExecutionPlan(round_id=1, pages_to_zero=(GroupBlocks(blocks=(3,)),))
        empty, forward = plane.execute(work, Dispatch()), device.execute(2)
        assert plane.commit(forward).tokens == [2]
        with pytest.raises(InvariantBroken):
            plane.commit(empty)
        assert plane.state.flights == {}


@pytest.mark.contract("RA-24", "DP-53")
def test_a_plan_is_adapted_once_and_its_storage_work_set_aside() -> None:
    write = WriteBackOp(op_id=1, group=0, device_blocks=(3,), host_blocks=(4,))
    put = StorageOp(op_id=2, verb=StorageVerb.PUT, keys=(b"k",))
    adapted: list[CacheOps] = []

    def adapt(work: ExecutionPlan) -> CacheOps:
        adapted.append(cache_ops_from_plan(work))
        return adapted[-1]

    handle = FakeHandle()
    handle.gate.set()
    plane = HostDataPlane(handle=handle, wakeup=CountingWakeup(), check=Strict(), adapt=adapt)
    plane.state.thread = threading.Thread(target=plane._serve, daemon=True)
    plane.state.thread.start()
    plane.execute(plan(cache=(put, write)), Dispatch())
    plane.close()
    assert adapted == [CacheOps(device=(write,), storage=(put,))]
    assert [args[2] for _, name, args in handle.log if name == "execute"] == [(write,)]
    assert isinstance(adapted[0].device, tuple)
    assert all(attrs.inspect(type(op)).is_frozen for op in (*adapted[0].device, *adapted[0].storage))


@pytest.mark.contract("OL-14", "DP-51")
def test_a_release_runs_behind_the_forwards_queued_before_it() -> None:
    with opened(shut=True) as device:
        ticket = device.execute()
        device.plane.release((0,), (0,))
        assert device.handle.entered.wait(TIMEOUT_S)
        assert device.handle.operations == []
        device.handle.gate.set()
        device.plane.commit(ticket)
        device.plane.idle_forward()
        assert device.handle.operations == ["execute", "release", "idle_forward"]


@pytest.mark.contract("DP-16", "SS-13")
@pytest.mark.parametrize("operation", ["execute", "release", "note_forwarded"])
def test_an_exception_surfaces_at_the_next_commit_and_at_every_later_call(operation: str) -> None:
    with opened(fail=operation) as device:
        device.plane.release((1,), (1,))
        device.plane.note_forwarded()
        tickets = [device.execute(), device.execute()]
        for ticket in tickets:
            with pytest.raises(ZeroDivisionError, match=operation):
                device.plane.commit(ticket)
        with pytest.raises(ZeroDivisionError, match=operation):
            device.plane.flush_cache()
        assert "flush_cache" not in device.handle.operations


@pytest.mark.contract("DP-16", "SS-13")
def test_an_exception_of_an_awaited_operation_is_raised_at_its_caller() -> None:
    with opened(fail="flush_cache") as device:
        with pytest.raises(ZeroDivisionError):
            device.plane.flush_cache()


@pytest.mark.contract("DP-16")
def test_what_the_device_raised_surfaces_at_the_commit_and_stays() -> None:
    with opened(held_landing=True) as device:
        ticket = device.execute()
        device.plane.idle_forward()
        device.handle.landings[0].error = ZeroDivisionError("on the device")
        device.handle.landings[0].land()
        with pytest.raises(ZeroDivisionError, match="on the device"):
            device.plane.commit(ticket)
        with pytest.raises(ZeroDivisionError, match="on the device"):
            device.plane.idle_forward()


def test_an_exception_wakes_an_idle_control_thread_and_counts_as_landed() -> None:
    with opened(fail="execute") as device:
        ticket = device.execute()
        assert device.wakeup.wait_for(1)
        assert wait_until(lambda: device.plane.landed(ticket))


def test_an_exception_nobody_was_told_of_is_raised_by_close() -> None:
    with opened(fail="release") as device:
        device.plane.release((1,), (1,))
        with pytest.raises(ZeroDivisionError):
            device.plane.close()
        assert device.handle.operations == ["release", "close"]
        device.plane.close()


def test_close_runs_what_is_queued_first_and_ends_the_use_of_the_plane() -> None:
    with opened(shut=True) as device:
        device.plane.release((1,), (1,))
        device.plane.note_forwarded()
        device.handle.gate.set()
        device.plane.close()
        assert device.handle.operations == ["release", "note_forwarded", "close"]
        for call in (device.execute, device.plane.note_forwarded, device.plane.idle_forward):
            with pytest.raises(InvariantBroken, match="after its close"):
                call()


def test_a_forward_thread_that_does_not_end_is_reported_with_what_it_is_in() -> None:
    with opened(shut=True) as device:
        device.execute()
        assert device.handle.entered.wait(TIMEOUT_S)
        with pytest.raises(Exception, match=r"ts-forward did not end within 0.01 s, inside Execute"):
            device.plane.close(timeout_s=0.01)
        device.handle.gate.set()
        device.plane.state.thread.join(TIMEOUT_S)


@pytest.mark.contract("PT-8")
def test_an_idle_forward_thread_uses_no_processor_time() -> None:
    with opened() as device:
        device.plane.idle_forward()
        thread, quiet = device.plane.state.thread, threading.Event()
        quiet.wait(0.1)  # the answer comes a moment before the thread blocks again
        before = switches(thread)
        quiet.wait(0.5)
        # Not even woken: a thread that polls gives up the processor at each turn.
        assert switches(thread) == before


def switches(thread: threading.Thread) -> int:
    """Context switches of a thread so far, from the kernel."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


@pytest.mark.contract("PT-17")
def test_a_busy_forward_thread_leaves_the_interpreter_to_completion_queries() -> None:
    stop = threading.Event()

    def spin(_operation: str) -> None:
        while not stop.is_set():
            pass

    with opened(body=spin) as device:
        ticket = device.execute()
        assert device.handle.entered.wait(TIMEOUT_S)
        for _ in range(20):
            assert device.plane.landed(ticket) is False
        # The forward thread spins in pure Python until the queries above have been answered.
        stop.set()
        assert device.plane.commit(ticket).tokens == [1]


@pytest.mark.contract("DP-49", "DP-50")
def test_arguments_cannot_be_changed_after_queueing() -> None:
    with opened(shut=True) as device:
        work = batch((0, 0, [5, 6]))
        device.plane.execute(plan(work=work), Dispatch())
        with pytest.raises(ValueError, match="read-only"):
            work.input_ids[0] = 9
        with pytest.raises(AttributeError):
            work.rows = work.slots
        device.handle.gate.set()
        device.plane.idle_forward()
        np.testing.assert_array_equal(device.handle.log[0][2][0].batch.input_ids, [5, 6])


@pytest.mark.contract("DP-28", "PT-6")
def test_the_plane_is_the_only_object_that_holds_the_handle() -> None:
    handle = FakeHandle()
    handle.gate.set()
    plane = open_data_plane(handle, CountingWakeup())
    plane.note_forwarded()
    plane.idle_forward()
    holders = [item for item in gc.get_referrers(handle) if type(item).__module__.startswith("tokenspeed")]
    plane.close()
    assert holders == [plane]


@pytest.mark.contract("DP-54")
def test_the_module_states_the_capture_contract_and_its_two_exceptions() -> None:
    text = data_plane.__doc__ or ""
    assert "capture contract" in text
    assert "multimodal items" in text
    assert "grammar matchers" in text
