"""CPU streams: FIFO, events, waits between streams, failures, bounded queue, closing."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest
import torch
from device_doubles import TIMEOUT_S, CountingWakeup, background, cpu_backend

from tokenspeed.device.backends.cpu import open_cpu_backend
from tokenspeed.device.backends.host_stream import Ended, HostStream, JobScope, open_host_stream
from tokenspeed.errors import DeviceLost, InvariantBroken


@pytest.fixture
def stream() -> HostStream:
    opened = open_host_stream("exec", JobScope())
    yield opened
    opened.close()


def test_jobs_run_one_after_another_on_the_thread_of_the_stream(stream: HostStream) -> None:
    log: list[tuple[int, str]] = []
    events = [
        stream.submit(lambda i=i: log.append((i, threading.current_thread().name)), f"job {i}") for i in range(100)
    ]
    events[-1].wait()
    assert log == [(i, "ts-exec") for i in range(100)]
    assert all(event.query() for event in events)


def test_a_held_stream_starts_nothing_and_its_events_say_so(stream: HostStream) -> None:
    ran = threading.Event()
    stream.hold()
    event = stream.submit(ran.set, "held")
    assert not event.query()
    assert event.busy_s == 0.0
    stream.release()
    event.wait()
    assert ran.is_set()


@pytest.mark.contract("DP-11")
def test_waiting_for_an_event_lets_other_python_threads_run(stream: HostStream) -> None:
    stream.hold()
    event = stream.submit(lambda: None, "held")
    with background(event.wait):
        # This line runs while the other thread waits, and is what ends the wait.
        stream.release()
    assert event.query()


def test_a_stream_waits_for_another_in_queue_order() -> None:
    log: list[str] = []
    with cpu_backend() as backend:
        backend.write_stream.hold()
        stored = backend.write_stream.submit(lambda: log.append("store"), "store")
        before = backend.exec_stream.submit(lambda: log.append("before"), "before")
        backend.exec_stream.wait(stored)
        after = backend.exec_stream.submit(lambda: log.append("after"), "after")
        before.wait()
        assert not after.query()
        backend.write_stream.release()
        after.wait()
    assert log == ["before", "store", "after"]


def test_without_a_wait_streams_do_not_hold_each_other_up() -> None:
    with cpu_backend() as backend:
        backend.write_stream.hold()
        stored = backend.write_stream.submit(lambda: None, "store")
        backend.exec_stream.submit(lambda: None, "batch").wait()
        assert not stored.query()


def test_a_failure_is_raised_at_every_later_event_and_later_jobs_are_skipped(stream: HostStream) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError("planted")

    first = stream.submit(lambda: ran.append("first"), "first")
    broken = stream.submit(fail, "broken")
    later = stream.submit(lambda: ran.append("later"), "later")
    first.wait()
    for event in (broken, later, broken):
        with pytest.raises(ZeroDivisionError, match="planted"):
            event.wait()
    assert ran == ["first"]


def test_a_failure_reaches_a_stream_that_waited_for_it() -> None:
    with cpu_backend() as backend:
        broken = backend.write_stream.submit([].pop, "store")
        backend.exec_stream.wait(broken)
        after = backend.exec_stream.submit(lambda: None, "batch")
        with pytest.raises(IndexError):
            after.wait()


def test_a_wakeup_is_set_when_the_job_ends_or_at_once_if_it_has(stream: HostStream) -> None:
    stream.hold()
    event, wakeup = stream.submit(lambda: None, "job"), CountingWakeup()
    event.notify(wakeup)
    assert wakeup.count == 0
    stream.release()
    assert wakeup.wait_for(1)
    event.notify(wakeup)
    assert wakeup.count == 2


def test_a_wakeup_is_set_by_a_job_that_failed_too(stream: HostStream) -> None:
    stream.hold()
    event, wakeup = stream.submit([].pop, "job"), CountingWakeup()
    event.notify(wakeup)
    stream.release()
    assert wakeup.wait_for(1)


def test_a_full_queue_blocks_the_submitter_until_there_is_room() -> None:
    stream = open_host_stream("exec", JobScope(), capacity=2)
    stream.hold()
    accepted: list[int] = []

    def submit_many() -> None:
        for i in range(8):
            stream.submit(lambda: None, f"job {i}")
            accepted.append(i)

    with background(submit_many) as submitter:
        submitter.join(0.2)
        # Two in the queue, and one that the stream took before it saw the closed gate.
        assert submitter.is_alive()
        assert len(accepted) <= 3
        stream.release()
    assert accepted == list(range(8))
    stream.close()


def test_closing_runs_what_is_queued_and_joins_even_a_held_stream() -> None:
    stream, ran = open_host_stream("exec", JobScope()), list[int]()
    stream.hold()
    for i in range(5):
        stream.submit(lambda i=i: ran.append(i), "job")
    stream.close()
    stream.close()
    assert ran == [0, 1, 2, 3, 4]
    assert not stream.thread.is_alive()
    with pytest.raises(InvariantBroken, match="after its close"):
        stream.submit(lambda: None, "late")


def test_closing_a_backend_ends_streams_that_wait_for_each_other_while_held() -> None:
    with cpu_backend() as backend:
        for stream in (backend.exec_stream, backend.write_stream, backend.load_stream):
            stream.hold()
        backend.load_stream.wait(backend.exec_stream.submit(lambda: None, "zero"))
        loaded = backend.load_stream.submit(lambda: None, "load")
        backend.write_stream.wait(loaded)
    names = {thread.name for thread in threading.enumerate()}
    assert names.isdisjoint({"ts-exec", "ts-write", "ts-load"})


def test_a_job_that_is_done_is_not_kept_alive_by_an_idle_stream(stream: HostStream) -> None:
    class Held:
        def __call__(self) -> None:
            return None

        def __del__(self) -> None:
            gone.set()

    gone = threading.Event()
    stream.submit(Held(), "job").wait()
    assert gone.wait(TIMEOUT_S)


def test_device_memory_opens_inside_a_job_only() -> None:
    with cpu_backend() as backend:
        made: list[object] = []
        backend.exec_stream.submit(lambda: made.append(backend.allocate((3,), torch.int64)), "allocate").wait()
        buffer = made[0]
        with pytest.raises(InvariantBroken, match="outside a stream job"):
            buffer.unwrap()
        backend.write_stream.submit(lambda: made.append(buffer.unwrap().sum()), "read").wait()
        assert int(made[1]) == 0
        with pytest.raises(InvariantBroken, match="outside a stream job"):
            backend.allocate((3,), torch.int64)


@pytest.mark.contract("DP-52", "DP-57")
def test_a_host_copy_cannot_be_read_before_its_event_and_keeps_its_values_afterwards() -> None:
    with cpu_backend() as backend:
        copies, made, go_on = [], threading.Event(), threading.Event()

        def job() -> None:
            tensor = torch.tensor([1, 2, 3])
            copies.append(backend.to_host(tensor))
            tensor.fill_(9)
            made.set()
            assert go_on.wait(TIMEOUT_S)

        event = backend.exec_stream.submit(job, "copy")
        assert made.wait(TIMEOUT_S)
        with pytest.raises(InvariantBroken, match="before its event"):
            copies[0].array()
        go_on.set()
        event.wait()
        np.testing.assert_array_equal(copies[0].array(), [1, 2, 3])


def test_the_exec_stream_computes_with_the_threads_it_was_given() -> None:
    before = torch.get_num_threads()
    with cpu_backend(threads=1) as backend:
        seen: list[int] = []
        backend.exec_stream.submit(lambda: seen.append(torch.get_num_threads()), "ask").wait()
    assert seen == [1]
    assert torch.get_num_threads() == before


def test_closing_with_a_hung_job_takes_a_bounded_time_and_names_stream_and_job() -> None:
    backend, never = attrs.evolve(open_cpu_backend(1), close_s=0.05), threading.Event()
    backend.exec_stream.submit(lambda: never.wait(TIMEOUT_S), "batch")
    behind = backend.exec_stream.submit(lambda: None, "fence")
    backend.write_stream.wait(behind)  # another stream hangs with it
    with pytest.raises(DeviceLost, match=r"stream 'exec' did not end within .* inside 'batch'"):
        backend.close()
    never.set()
    for stream in (backend.exec_stream, backend.write_stream, backend.load_stream):
        stream.thread.join(TIMEOUT_S)
        assert not stream.thread.is_alive()


def test_closing_a_full_stream_that_hangs_takes_a_bounded_time() -> None:
    stream, never = open_host_stream("exec", JobScope(), capacity=1), threading.Event()
    begun = threading.Event()
    stream.submit(lambda: (begun.set(), never.wait(TIMEOUT_S)), "batch")
    assert begun.wait(TIMEOUT_S)
    stream.submit(lambda: None, "fence")  # there is no room for more
    with pytest.raises(DeviceLost, match=r"stream 'exec' did not end within 0.05 s, inside 'batch'"):
        stream.close(0.05)
    never.set()
    stream.entries.put(Ended())
    stream.thread.join(TIMEOUT_S)
    assert not stream.thread.is_alive()
