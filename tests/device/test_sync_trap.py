"""The trap for waits of per-round work: what it reports, how, and what it lets pass."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from device_doubles import CountingWakeup, FakeHandle, plan

from tokenspeed.device.backends.cpu import open_cpu_backend
from tokenspeed.device.backends.host_stream import HostEvent
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.guards import WARN_EVERY, CudaSyncDebug, HostSyncDebug, sync_debug
from tokenspeed.device.host_sync import allow_host_sync, device_code, host_to_device
from tokenspeed.device.sync_trap import SWITCH, SyncDebugMode, SyncTrap
from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.plane.plan import Dispatch

T = torch.arange(4.0)
WAITS: dict[str, Callable[[], object]] = {
    "item": T[1].item,
    "tolist": T.tolist,
    "cpu": T.cpu,
    "to cpu": lambda: T.to("cpu"),
    "to device cpu": lambda: T.to(device=torch.device("cpu")),
    "numpy": T.numpy,
    "asarray": lambda: np.asarray(T),
    "bool": lambda: bool(T[0]),
    "if": lambda: 1 if T[0] > 1 else 2,
    "int": lambda: int(T[0]),
    "float": lambda: float(T[0]),
    "nonzero": T.nonzero,
    "torch.nonzero": lambda: torch.nonzero(T),
    "where": lambda: torch.where(T > 1),
    "mask": lambda: T[T > 1],
    "contains": lambda: 1.0 in T,
    "equal": lambda: torch.equal(T, T),
    "text": lambda: f"{T}",
    "pageable": lambda: torch.tensor([1, 2]),
}
PASSES: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (T + 1).softmax(0),
    "slice": lambda: T[1:3],
    "dtype": lambda: T.to(torch.float64),
    "where": lambda: torch.where(T > 1, T, T),
    "index": lambda: T.index_select(0, torch.zeros(2, dtype=torch.int64)),
    "shape": lambda: (T.shape, len(T), T.dtype, T.data_ptr()),
    "empty": lambda: torch.empty(4),
    "to device": lambda: host_to_device(np.zeros(3), torch.device("cpu")),
}


@pytest.mark.contract("DP-55", "DP-61")
@pytest.mark.parametrize("name", WAITS)
def test_each_form_that_waits_raises_at_its_place(name: str) -> None:
    with SyncTrap(SyncDebugMode.ERROR), pytest.raises(InvariantBroken, match=r"test_sync_trap\.py:\d+"):
        WAITS[name]()
    WAITS[name]()


@pytest.mark.contract("DP-63")
@pytest.mark.parametrize("name", PASSES)
def test_what_does_not_wait_is_not_reported(name: str) -> None:
    with SyncTrap(SyncDebugMode.ERROR):
        PASSES[name]()


@pytest.mark.contract("DP-61")
def test_a_warning_names_file_and_line_once_a_place(caplog: pytest.LogCaptureFixture) -> None:
    trap = SyncTrap(SyncDebugMode.WARN)
    with caplog.at_level(logging.WARNING), trap:
        for _ in range(3):
            assert T[2].item() == 2
        assert T.tolist() == [0, 1, 2, 3]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert ".item()" in lines[0]
    assert ".tolist()" in lines[1]
    first, second = (int(line.split("test_sync_trap.py:")[1].split(" ")[0]) for line in lines)
    assert second == first + 1


@pytest.mark.contract("DP-64")
def test_a_wait_that_is_allowed_is_not_reported_and_the_allowance_ends_with_its_block() -> None:
    with SyncTrap(SyncDebugMode.ERROR):
        with allow_host_sync():
            with allow_host_sync():
                T.tolist()
            T.tolist()
        with pytest.raises(ZeroDivisionError), allow_host_sync():
            raise ZeroDivisionError
        with pytest.raises(InvariantBroken):
            T.tolist()


@pytest.mark.contract("DP-64")
def test_an_allowance_is_its_threads_own() -> None:
    def job() -> None:
        T.tolist()

    trap = SyncTrap(SyncDebugMode.ERROR)
    backend = open_cpu_backend(1, watch=lambda: trap)
    try:
        with allow_host_sync():
            event = backend.exec_stream.submit(job, "waits")
            with pytest.raises(InvariantBroken, match="tolist"):
                event.wait()
    finally:
        backend.close()


def test_a_kernel_of_the_cpu_reads_its_own_memory() -> None:
    @device_code
    def kernel(values: torch.Tensor, *, plus: int) -> list[float]:
        return (values.numpy() + plus).tolist()

    with SyncTrap(SyncDebugMode.ERROR):
        assert kernel(T, plus=1) == [1, 2, 3, 4]
        with pytest.raises(InvariantBroken):
            T.tolist()


@pytest.mark.contract("DP-55", "DP-63")
def test_waiting_for_an_event_is_reported_unless_it_has_passed() -> None:
    ended, pending = HostEvent(), HostEvent()
    ended.complete(None, 0.0)
    with SyncTrap(SyncDebugMode.ERROR):
        ended.wait()
        with pytest.raises(InvariantBroken, match="an event"):
            pending.wait()


@pytest.mark.contract("DP-59", "DP-60", "DP-61")
def test_jobs_of_the_exec_stream_are_watched_from_arming_on_and_copies_are_not() -> None:
    sync = sync_debug({SWITCH: "error"})
    backend = open_cpu_backend(1, watch=sync.watching)

    def job() -> None:
        T.tolist()

    try:
        backend.exec_stream.submit(job, "start-up").wait()
        sync.arm()
        backend.write_stream.submit(job, "copy").wait()
        with pytest.raises(InvariantBroken, match="tolist"):
            backend.exec_stream.submit(job, "forward").wait()
    finally:
        backend.close()


@pytest.mark.contract("DP-55", "DP-60")
def test_operations_of_a_round_are_watched_on_the_forward_thread_and_awaited_ones_may_wait() -> None:
    sync = sync_debug({SWITCH: "error"})
    handle = FakeHandle(body=lambda _operation: T.tolist() and None)
    handle.gate.set()
    plane = open_data_plane(handle, CountingWakeup(), sync=sync)
    plane.commit(plane.execute(plan(), Dispatch()))
    sync.arm()
    plane.flush_cache()
    plane.stop_profile()
    ticket = plane.execute(plan(), Dispatch())
    with pytest.raises(InvariantBroken, match=r"tolist.*ts-forward"):
        plane.commit(ticket)
    plane.close()


@pytest.mark.contract("DP-59", "DP-61")
@pytest.mark.parametrize(("value", "mode"), [(None, "warn"), ("", "warn"), ("warn", "warn"), ("error", "error")])
def test_arming_reaches_torchs_own_mode_on_cuda_whatever_the_environment_says(value: str | None, mode: str) -> None:
    environ = {} if value is None else {SWITCH: value}
    host, cuda = sync_debug(environ), sync_debug(environ, device_type="cuda")
    assert isinstance(host, HostSyncDebug)
    assert isinstance(cuda, CudaSyncDebug)
    assert host.trap.mode is cuda.mode is SyncDebugMode(mode)
    assert cuda.set_mode is torch.cuda.set_sync_debug_mode
    told: list[str] = []
    debug = CudaSyncDebug(mode=cuda.mode, set_mode=told.append)
    assert told == []
    debug.arm()
    assert told == [mode]
    host.arm()
    assert host.watching() is host.trap


@pytest.mark.contract("DP-61")
@pytest.mark.parametrize(("mode", "every"), [("warn", WARN_EVERY), ("error", 1)])
def test_where_it_is_only_reported_one_piece_of_work_in_so_many_is_watched(mode: str, every: int) -> None:
    sync = sync_debug({SWITCH: mode})
    assert isinstance(sync, HostSyncDebug)
    sync.arm()
    watched = [sync.watching() is sync.trap for _ in range(2 * every + 1)]
    assert watched == [turn % every == 0 for turn in range(2 * every + 1)]


@pytest.mark.contract("DP-59")
@pytest.mark.parametrize("value", ["0", "off", "Error", "none"])
def test_sync_debugging_cannot_be_switched_off(value: str) -> None:
    with pytest.raises(SettingsError, match=f"{SWITCH}.*warn, error"):
        sync_debug({SWITCH: value})


@pytest.mark.contract("DP-58")
def test_host_built_metadata_is_made_contiguous_and_not_copied_if_it_is() -> None:
    cpu, array = torch.device("cpu"), np.arange(12).reshape(3, 4)
    turned = host_to_device(array.T, cpu)
    assert turned.is_contiguous()
    assert turned.tolist() == array.T.tolist()
    assert host_to_device(array, cpu).data_ptr() == array.ctypes.data


@pytest.mark.contract("DP-58")
def test_to_cuda_it_goes_out_of_pinned_memory_without_blocking() -> None:
    calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    class Driver(torch.overrides.TorchFunctionMode):
        """Stands where the copy to a graphics device would begin."""

        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            calls.append((func.__name__, args[1:], kwargs or {}))
            assert args[0].is_contiguous()
            return args[0]

    cuda = torch.device("cuda")
    with Driver():
        host_to_device(np.arange(12).reshape(3, 4).T, cuda)
    assert calls == [("pin_memory", (), {}), ("to", (cuda,), {"non_blocking": True})]
