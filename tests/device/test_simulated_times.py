"""The simulated device's clock: times are computed, streams order each other, the host wakes no job late."""

from __future__ import annotations

import threading

import pytest
from device_doubles import TIMEOUT_S, CountingWakeup, background
from sim_rig import JobLog, hand_device

from tokenspeed.device.backends.simulated import open_simulated_backend
from tokenspeed.device.backends.simulated_time import TIMER_THREAD
from tokenspeed.errors import InvariantBroken


def test_a_job_begins_at_the_end_of_the_one_before_however_late_the_host_looks() -> None:
    with hand_device() as device:
        stream = device.backend.exec_stream
        first = stream.submit(lambda: device.work.charge(0.010), "a")
        second = stream.submit(lambda: device.work.charge(0.020), "b")
        device.advance_to(0.050)  # the host was away for 50 ms
        stream.submit(lambda: device.work.charge(0.001), "c")
        assert first.query()
        assert second.query()
        assert second.busy_s == pytest.approx(0.020)
        assert device.log.of("a") == [pytest.approx((0.0, 0.010))]
        assert device.log.of("b") == [pytest.approx((0.010, 0.030))]
        assert device.log.of("c") == [pytest.approx((0.050, 0.051))]


def test_an_event_is_over_at_its_computed_end_and_not_before() -> None:
    with hand_device() as device:
        event, wakeup = device.backend.exec_stream.submit(lambda: device.work.charge(0.010), "a"), CountingWakeup()
        event.notify(wakeup)
        device.advance_to(0.0099)
        assert not event.query()
        assert wakeup.count == 0
        device.advance_to(0.0101)
        assert event.query()
        assert wakeup.count == 1
        event.wait()


def test_a_host_copy_is_readable_from_the_end_of_its_job_on() -> None:
    import torch

    with hand_device() as device:
        copies = []

        def job() -> None:
            tensor = torch.tensor([1, 2])
            copies.append(device.backend.to_host(tensor))
            tensor.zero_()
            device.work.charge(0.010)

        device.backend.exec_stream.submit(job, "a")
        with pytest.raises(InvariantBroken, match="before its event"):
            copies[0].array()
        device.advance_to(0.011)
        assert copies[0].array().tolist() == [1, 2]


def test_a_stream_begins_behind_what_it_waits_for_and_streams_run_beside_each_other() -> None:
    with hand_device() as device:
        run, load = device.backend.exec_stream, device.backend.load_stream
        loaded = load.submit(lambda: device.work.charge(0.030), "load")
        run.submit(lambda: device.work.charge(0.010), "beside")
        run.wait(loaded)
        run.submit(lambda: device.work.charge(0.010), "behind")
        assert device.log.of("beside") == [pytest.approx((0.0, 0.010))]
        assert device.log.of("behind") == [pytest.approx((0.030, 0.040))]


def test_a_held_device_begins_nothing_and_goes_on_where_it_is_released() -> None:
    with hand_device() as device:
        stream = device.backend.exec_stream
        before = stream.submit(lambda: device.work.charge(0.010), "before")
        stream.hold()
        ran = []
        held = [stream.submit(lambda: (ran.append(1), device.work.charge(0.005)), "held") for _ in range(2)]
        device.advance_to(0.020)
        assert before.query()
        assert [event.query() for event in held] == [False, False]
        stream.release()
        assert device.log.of("held") == [pytest.approx((0.020, 0.025)), pytest.approx((0.025, 0.030))]
        device.advance_to(0.030001)
        assert all(event.query() for event in held)


def test_what_a_job_raises_comes_out_of_its_event_and_of_every_later_one() -> None:
    with hand_device() as device:
        run, load = device.backend.exec_stream, device.backend.load_stream
        ran: list[str] = []

        def fault() -> None:
            raise ZeroDivisionError

        broken = load.submit(fault, "fault")
        run.wait(broken)
        later = run.submit(lambda: ran.append("later"), "later")
        device.advance(0.001)
        for event in (broken, later):
            with pytest.raises(ZeroDivisionError):
                event.wait()
        assert ran == []


def test_device_memory_is_out_of_reach_outside_a_job() -> None:
    import torch

    with hand_device() as device:
        made = []
        device.backend.exec_stream.submit(lambda: made.append(device.backend.allocate((2,), torch.int64)), "make")
        with pytest.raises(InvariantBroken, match="outside a stream job"):
            made[0].unwrap()


def test_a_closed_device_takes_no_job_and_leaves_no_thread() -> None:
    with hand_device() as device:
        event = device.backend.exec_stream.submit(lambda: device.work.charge(3600.0), "long")
        device.backend.close()
        event.wait()  # its hour was never waited for
        device.backend.close()
        with pytest.raises(InvariantBroken, match="after its close"):
            device.backend.exec_stream.submit(lambda: None, "late")
    assert TIMER_THREAD not in [thread.name for thread in threading.enumerate()]


def test_the_timer_thread_completes_events_in_order_on_the_hosts_clock() -> None:
    log = JobLog()
    backend = open_simulated_backend(observer=log)
    try:
        seen: list[int] = []
        events = [
            backend.exec_stream.submit(lambda: backend.work.charge(0.002), "job"),
            backend.exec_stream.submit(lambda: backend.work.charge(0.004), "job"),
        ]
        with background(lambda: [(event.wait(), seen.append(i)) for i, event in enumerate(events)]) as waiter:
            waiter.join(TIMEOUT_S)
        assert seen == [0, 1]
        (_, first_end), (second_begin, second_end) = log.of("job")
        assert second_begin == first_end
        assert second_end - second_begin == pytest.approx(0.004)
    finally:
        backend.close()


def test_a_shorter_job_of_another_stream_ends_while_a_long_one_runs() -> None:
    backend = open_simulated_backend()
    try:
        long = backend.exec_stream.submit(lambda: backend.work.charge(3600.0), "long")
        short = backend.load_stream.submit(lambda: backend.work.charge(0.001), "short")
        wakeup = CountingWakeup()
        short.notify(wakeup)
        assert wakeup.wait_for(1)
        assert not long.query()
    finally:
        backend.close()
