"""Device futures, the lock of an output, ranks, refusals, and what the flow gains, in device time."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_doubles import TIMEOUT_S, background, batch, checkpoint, granted, seat
from futures_rig import PROMPTS, FlowLog, Stage, Touch, cpu_futures, drive, sim_futures
from sim_rig import hand_device

import tokenspeed.control
import tokenspeed.scheduler
from tokenspeed.device.build import build_device_side
from tokenspeed.device.executors.futures.executor import FuturesExecutor
from tokenspeed.device.executors.futures.output import OUTPUT_THREAD
from tokenspeed.device.executors.futures.runtime import FuturesRuntime
from tokenspeed.device.executors.streams import StreamExecutor
from tokenspeed.device.handle import Executor
from tokenspeed.device.parts import DeviceParts
from tokenspeed.device.toy import ToySampler
from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.settings.model import Backend, DeviceSettings, SchedulerSettings, Settings, SimulatedSettings
from tokenspeed.settings.model import Executor as ExecutorKind

# ---- the runtime ------------------------------------------------------------------------------


def job(work: Callable[[], None], value: int = 7) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        work()
        return torch.tensor([value])

    return run


ONE = {"shape": (1,), "dtype": torch.int64}


@pytest.mark.contract("AF-10")
def test_a_job_with_an_unresolved_input_begins_once_it_is_resolved() -> None:
    with hand_device() as device:
        runtime = FuturesRuntime(backend=device.backend)
        load = device.backend.load_stream.submit(lambda: device.work.charge(0.050), "load")
        first = runtime.launch(job(lambda: device.work.charge(0.010)), inputs=(), label="first", **ONE)
        device.backend.exec_stream.wait(load)
        second = runtime.launch(job(lambda: device.work.charge(0.010)), inputs=(first,), label="second", **ONE)
        third = runtime.launch(job(lambda: device.work.charge(0.010)), inputs=(second,), label="third", **ONE)
        assert device.log.of("first") == [pytest.approx((0.0, 0.010))]
        assert device.log.of("second") == [pytest.approx((0.050, 0.060))]
        assert device.log.of("third") == [pytest.approx((0.060, 0.070))]
        assert not third.resolved()


@pytest.mark.contract("AF-11")
def test_touching_an_output_waits_for_the_end_of_its_job() -> None:
    touched, read = threading.Event(), []
    log = FlowLog(at_touch=lambda _future: touched.set())
    with hand_device() as device:
        runtime = FuturesRuntime(backend=device.backend, log=log)
        future = runtime.launch(job(lambda: device.work.charge(0.050)), inputs=(), label="job", to_host=True, **ONE)
        with background(lambda: read.append(future.to_host("test").tolist())):
            assert touched.wait(TIMEOUT_S)
            device.advance_to(0.049)
            assert (read, future.resolved()) == ([], False)
            device.advance_to(0.051)
        assert read == [[7]]
    assert log.of(Touch)[0].resolved is False


def test_a_future_read_before_its_job_or_of_another_shape_is_a_broken_invariant() -> None:
    with hand_device() as device:
        runtime = FuturesRuntime(backend=device.backend)
        wrong = runtime.launch(job(lambda: None), inputs=(), label="wrong", shape=(2,), dtype=torch.int64, to_host=True)
        with pytest.raises(InvariantBroken, match="another kind than announced"):
            wrong.to_host("test")
        with pytest.raises(InvariantBroken, match="used before its job ran"):
            wrong.unwrap()
    with hand_device() as device:
        runtime = FuturesRuntime(backend=device.backend)
        private = runtime.launch(job(lambda: None), inputs=(), label="private", **ONE)
        with pytest.raises(InvariantBroken, match="not made to be read"):
            private.to_host("test")


# ---- locking and ranks ------------------------------------------------------------------------


@pytest.mark.contract("AF-63")
def test_of_two_threads_that_materialise_one_output_the_loser_finds_it_done() -> None:
    with cpu_futures(rank=1) as rig:  # not the output rank: nobody else materialises
        driver = drive(rig)
        driver.prefill(0)
        start, end, wins = threading.Barrier(2), threading.Barrier(2), []
        outputs = []

        def other() -> None:
            for _ in range(1000):
                start.wait(TIMEOUT_S)
                wins.append(outputs[-1].get_output())
                end.wait(TIMEOUT_S)

        with background(other):
            for _ in range(1000):
                outputs.append(rig.buffer.async_output)
                start.wait(TIMEOUT_S)
                wins.append(outputs[-1].get_output())
                end.wait(TIMEOUT_S)
                if driver.at[0] < 60:
                    driver.submit(0)
                else:  # the slot is full: the same request again
                    driver.end(0)
                    driver.prefill(0)
        assert sum(wins) == 1000
        finished = [stage for stage in rig.log.of(Stage) if stage.name == "output"]
        assert len(finished) == 1000
        assert all(output.landed() for output in outputs)


@pytest.mark.contract("AF-64", "AF-65", "AF-66", "AF-37")
@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_output_rank_materialises_each_step_and_the_others_only_in_a_break(rank: int) -> None:
    with sim_futures(rank=rank, output_rank=0) as rig:
        driver = drive(rig)
        landings = [driver.prefill(0, 1)] + [driver.submit(0, 1) for _ in range(20)]
        if rank == 0:
            for landing in landings:
                driver.finish(landing)
        rig.device.advance(10.0)
        threads = [stage.thread for stage in rig.log.of(Stage) if stage.name == "output"]
        assert threads == ([OUTPUT_THREAD] * 21 if rank == 0 else [])
        assert not any(touch.thread != OUTPUT_THREAD for touch in rig.log.of(Touch))
        rig.log.clear()
        last = driver.truth(0, 1), driver.sequence(0, 99)[driver.at[0]]
        driver.submit(0, 1, 2, joining=(2,))
        assert [stage.detail for stage in rig.log.of(Stage) if stage.name == "materialize"] == [
            "batch composition changed"
        ]
        assert rig.step.ids[-1] == [*driver.truth(0, 1), *PROMPTS[2]]
        assert rig.tokens_of(0, driver.at[0])[-1] == last[1]
        if rank == 1:
            main = threading.current_thread().name
            assert [stage.thread for stage in rig.log.of(Stage) if stage.name == "output"] == [main]


# ---- what it presupposes ----------------------------------------------------------------------


class HostSampler(ToySampler):
    samples_on_host = True


SETTINGS = Settings(
    device=DeviceSettings(backend=Backend.SIMULATED, executor=ExecutorKind.FUTURES),
    simulated=SimulatedSettings(step_ms=0.0),
    scheduler=SchedulerSettings(max_num_seqs=4, max_batched_tokens=64),
)


@pytest.mark.contract("AF-4")
def test_a_sampler_on_the_host_is_refused_with_async_scheduling_and_taken_without() -> None:
    def host_sampler(*, slots: int, vocab_size: int) -> HostSampler:
        return HostSampler()

    parts = DeviceParts(sampler=host_sampler)
    with pytest.raises(SettingsError, match=r"device.async_scheduling: this sampler samples on the host"):
        build_device_side(SETTINGS, checkpoint(), parts)
    left = [thread.name for thread in threading.enumerate() if thread.name in (OUTPUT_THREAD, "ts-device-clock")]
    assert left == []
    with cpu_futures(sampler=HostSampler(), asynchronous=False) as rig:
        driver = drive(rig)
        assert driver.finish(driver.prefill(0)) == driver.sequence(0, 4)[3:]


@pytest.mark.contract("AF-9", "AF-67")
@pytest.mark.parametrize("backend", [Backend.CPU, Backend.SIMULATED])
@pytest.mark.parametrize(("kind", "made"), [("streams", StreamExecutor), ("futures", FuturesExecutor)])
def test_the_setting_chooses_the_executor_and_both_do_the_same_operations(
    backend: Backend, kind: str, made: type
) -> None:
    device = DeviceSettings(
        backend=backend, executor=ExecutorKind(kind), memory_gib=0.25 if backend is Backend.CPU else None
    )
    simulated = SETTINGS.simulated if backend is Backend.SIMULATED else SimulatedSettings()
    settings = Settings(device=device, simulated=simulated, scheduler=SETTINGS.scheduler)
    build = build_device_side(settings, checkpoint())
    try:
        assert build.specs.executor == kind
        assert type(build.handle.executor) is made
        operations = [name for name, value in vars(Executor).items() if callable(value) and not name.startswith("_")]
        assert all(callable(getattr(made, name)) for name in operations)
    finally:
        build.handle.close()
    assert OUTPUT_THREAD not in [thread.name for thread in threading.enumerate()]


@pytest.mark.contract("AF-28", "AF-67")
@pytest.mark.parametrize("package", [tokenspeed.control, tokenspeed.scheduler])
def test_neither_round_nor_scheduler_knows_which_executor_runs(package: object) -> None:
    for path in Path(package.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert names.isdisjoint({"executor", "async_scheduling", "FuturesExecutor", "StreamExecutor"}), path.name


# ---- what it gains, in device time ------------------------------------------------------------


def step_time(forward_s: float, host_s: float, *, asynchronous: bool, steps: int = 12) -> tuple[float, float]:
    """(seconds a steady step takes, seconds in which host and device both worked), on the device's clock."""
    busy: list[tuple[float, float]] = []
    with sim_futures(forward_s, asynchronous=asynchronous) as rig:
        device, driver = rig.device, drive(rig)

        def now() -> float:
            return device.clock.at_s - device.log.origin_s

        def host_work() -> None:
            begin = now()
            device.advance(host_s)
            busy.append((begin, now()))

        def commit(landing: object) -> None:
            # Blocked until this step ends: nothing else moves the clock.
            device.advance_to(max(now(), landing.future.event.span.end_s - device.log.origin_s))
            landing.result()

        flights = [driver.prefill(0)]
        marks = []
        for _ in range(steps):
            host_work()
            flights.append(driver.submit(0))
            if len(flights) > asynchronous:
                commit(flights.pop(0))
            marks.append(now())
        device.advance_to_end()
        forwards = device.log.of("forward")
    both = sum(max(0.0, min(e, f) - max(b, d)) for b, e in busy for d, f in forwards)
    steady = marks[2:]
    return (steady[-1] - steady[0]) / (len(steady) - 1), both


@pytest.mark.contract("AF-1", "AF-2")
def test_host_work_hides_behind_the_device_in_the_asynchronous_flow_only() -> None:
    step_s, both_s = step_time(0.020, 0.010, asynchronous=True)
    assert step_s == pytest.approx(0.020, abs=1e-4)
    assert both_s > 0.05
    step_s, both_s = step_time(0.020, 0.010, asynchronous=False)
    assert step_s == pytest.approx(0.030, abs=1e-4)
    assert both_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.contract("AF-7")
def test_the_shorter_the_forward_the_larger_the_gain() -> None:
    gains = [
        step_time(forward_s, 0.005, asynchronous=False)[0] / step_time(forward_s, 0.005, asynchronous=True)[0]
        for forward_s in (0.005, 0.020, 0.080)
    ]
    assert gains == pytest.approx([2.0, 1.25, 1.0625], rel=0.02)


@pytest.mark.contract("AF-25", "AF-27")
def test_the_next_step_is_scheduled_while_the_output_thread_is_in_get_output() -> None:
    with sim_futures() as rig:
        driver = drive(rig)
        driver.finish(driver.prefill(0))
        landings = []
        inside = 0
        for _ in range(20):
            waiting = threading.Event()
            rig.log.at_touch = lambda _future, waiting=waiting: waiting.set()
            landings.append(driver.submit(0))
            assert waiting.wait(TIMEOUT_S)  # the output thread waits for this step
            # Here the control plane schedules the next one.
            inside += not landings[-1].landed()
            rig.log.at_touch = lambda _future: None
            driver.finish(landings[-1])
        assert inside == 20


@pytest.mark.contract("AF-69", "DP-55")
def test_the_forward_thread_waits_in_breaks_only_each_allowed_and_counted() -> None:
    with sim_futures(buckets=(1, 2, 4, 8)) as rig:
        driver = drive(rig)
        script = [((0, 1, 2), ()), ((0, 1, 2), ()), ((2, 1, 0), ()), ((2, 1, 0, 3), (3,)), ((2, 1), ()), ((2, 1), ())]
        landings = [driver.prefill(0, 1, 2)]
        for slots, joining in script:
            allowed, before = len(rig.syncs), rig.counters[0]
            rig.log.clear()
            landings.append(driver.submit(*slots, joining=joining))
            steady = rig.counters[0] > before
            assert (len(rig.syncs) == allowed) == steady
            if steady:
                assert rig.log.waits_here() == []
        assert len(rig.syncs) == rig.counters[1] - 1  # the first step has nothing to wait for
        for landing in landings:
            driver.finish(landing)


def test_a_step_that_samples_nothing_lands_without_tokens_and_the_next_goes_on() -> None:
    with sim_futures() as rig:
        driver = drive(rig)
        prompt = PROMPTS[3]
        landing = rig.submit(
            batch((3, 0, prompt[:2]), samples=[False]),
            seats=(seat(3, prompt_len=len(prompt)),),
            grants=granted((3, 0, 9)),
        )
        assert driver.finish(landing) == []
        last = rig.submit(batch((3, 2, prompt[2:])))
        assert driver.finish(last) == driver.sequence(3, 6)[5:]
