"""The CUDA backend over stand-ins for the driver's streams and events: what is recorded, waited for and copied how."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs
import pytest
import torch
from cuda_stand_in import StandInCuda, StandInStream, numbers

from tokenspeed.device.backends.cuda import CudaBackend, open_cuda_backend
from tokenspeed.device.backends.host_stream import HostEvent
from tokenspeed.errors import InvariantBroken, NotSupported


@attrs.define(eq=False)
class Bell:
    rung: threading.Event = attrs.field(factory=threading.Event)

    def set(self) -> None:
        self.rung.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self.rung.wait(timeout_s)


@pytest.fixture
def api() -> StandInCuda:
    return StandInCuda()


@pytest.fixture
def backend(api: StandInCuda) -> Iterator[CudaBackend]:
    opened = open_cuda_backend(torch.get_num_threads(), api=api)
    yield opened
    api.end_all()
    opened.close()


def stream_of(api: StandInCuda, name: str) -> StandInStream:
    return api.streams[("exec", "write", "load").index(name)]


def test_a_job_lies_between_its_two_marks_on_its_own_stream(api: StandInCuda, backend: CudaBackend) -> None:
    seen: list[object] = []
    event = backend.write_stream.submit(lambda: seen.append(api.current_stream()), "copy")
    assert seen == [stream_of(api, "write")]
    assert stream_of(api, "write").log == [("record", 0), ("record", 1)]
    assert event.busy_s == pytest.approx(0.010)
    assert not stream_of(api, "exec").log


def test_a_wait_comes_behind_the_jobs_before_and_ahead_of_those_after(api: StandInCuda, backend: CudaBackend) -> None:
    stored = backend.write_stream.submit(lambda: None, "store")
    backend.exec_stream.submit(lambda: None, "before")
    backend.exec_stream.wait(stored)
    backend.exec_stream.submit(lambda: None, "after")
    assert stream_of(api, "exec").log == [("record", 2), ("record", 3), ("wait", 1), ("record", 4), ("record", 5)]


def test_a_stream_waits_for_its_own_devices_events_only(backend: CudaBackend) -> None:
    with pytest.raises(InvariantBroken, match="events of its own device only"):
        backend.exec_stream.wait(HostEvent())


@pytest.mark.contract("DP-57")
def test_results_are_copied_into_pinned_memory_without_waiting_ahead_of_the_jobs_mark(
    api: StandInCuda, backend: CudaBackend
) -> None:
    api.held = True
    copies = []
    source = torch.arange(3)
    event = backend.exec_stream.submit(lambda: copies.append(backend.to_host(source)), "copy out")
    assert api.calls == [("pinned", (3,))]
    assert not event.query()
    assert event.busy_s == 0.0
    with pytest.raises(InvariantBroken, match="a host copy read before its event"):
        copies[0].array()
    source.zero_()
    api.end_all()
    event.wait()
    assert copies[0].array().tolist() == [0, 1, 2]


@pytest.mark.contract("DP-58")
def test_metadata_goes_to_the_device_on_the_jobs_own_stream(api: StandInCuda, backend: CudaBackend) -> None:
    got = []
    backend.exec_stream.submit(lambda: got.append(backend.to_device(numbers(1, 2))), "inputs").wait()
    assert got[0].tolist() == [1, 2]
    assert api.calls == [("to_device", stream_of(api, "exec"))]


def test_device_memory_is_touched_by_jobs_only(backend: CudaBackend) -> None:
    made = []
    backend.exec_stream.submit(lambda: made.append(backend.allocate((2,), torch.int64)), "allocate").wait()
    for touch in (made[0].unwrap, lambda: backend.to_device(numbers(1)), lambda: backend.to_host(torch.zeros(1))):
        with pytest.raises(InvariantBroken, match="outside a stream job"):
            touch()
    backend.load_stream.submit(lambda: made.append(made[0].unwrap()), "look").wait()
    assert made[1].tolist() == [0, 0]


def test_after_a_raise_later_jobs_are_skipped_and_their_events_carry_it(backend: CudaBackend) -> None:
    ran = []

    def fail() -> None:
        raise ValueError("a bad kernel")

    events = [backend.load_stream.submit(job, "job") for job in (fail, lambda: ran.append(1))]
    backend.exec_stream.wait(events[0])
    events.append(backend.exec_stream.submit(lambda: ran.append(2), "behind"))
    for event in events:
        assert event.query()
        with pytest.raises(ValueError, match="a bad kernel"):
            event.wait()
    assert ran == []


def test_whoever_waits_for_an_end_is_woken_by_it_and_not_before(api: StandInCuda, backend: CudaBackend) -> None:
    api.held = True
    late, other = Bell(), Bell()
    event = backend.exec_stream.submit(lambda: None, "long")
    event.notify(late)
    api.held = False
    backend.load_stream.submit(lambda: None, "short").notify(other)
    assert other.wait(30)
    assert not late.rung.is_set()
    api.end_all()
    assert late.wait(30)
    now = Bell()
    event.notify(now)
    assert now.rung.is_set()


def test_closing_waits_for_what_was_launched_and_leaves_no_thread(api: StandInCuda) -> None:
    backend = open_cuda_backend(torch.get_num_threads(), api=api)
    api.held = True
    backend.exec_stream.submit(lambda: None, "last")
    closer = threading.Thread(target=backend.close, daemon=True)
    closer.start()
    assert backend.exec_stream.notifier.is_alive()
    api.end_all()
    closer.join(30)
    assert not closer.is_alive()
    assert not any(s.notifier.is_alive() for s in (backend.exec_stream, backend.write_stream, backend.load_stream))
    backend.close()
    with pytest.raises(InvariantBroken, match="a stream used after its close"):
        backend.exec_stream.submit(lambda: None, "too late")


def test_a_job_is_not_submitted_from_a_job(backend: CudaBackend) -> None:
    event = backend.exec_stream.submit(lambda: backend.load_stream.submit(lambda: None, "inner").wait(), "outer")
    with pytest.raises(InvariantBroken, match="a job was submitted from a job"):
        event.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is missed here")
def test_without_cuda_the_backend_is_refused_in_words() -> None:
    with pytest.raises(NotSupported, match=r"device.backend: cuda (needs a torch built with CUDA|finds no usable)"):
        open_cuda_backend(1)
