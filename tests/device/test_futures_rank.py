"""Event loop, scheduler, data plane and the futures executor together: same tokens, steady flow, derived copies."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
from device_doubles import TIMEOUT_S, CountingWakeup
from futures_rig import FlowLog, Stage
from rig import SPECS, Rig, hand_rig, request

from tokenspeed.device.backends.simulated import Work, open_simulated_backend
from tokenspeed.device.backends.simulated_model import SimulatedLogprobs, SimulatedModel, SimulatedSampler
from tokenspeed.device.backends.simulated_roofline import FixedStep
from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import THREAD_NAME, HostDataPlane, open_data_plane
from tokenspeed.device.executors.futures.executor import FuturesExecutor, futures_executor
from tokenspeed.device.executors.futures.model_input import powers_of_two
from tokenspeed.device.executors.futures.output import OUTPUT_THREAD
from tokenspeed.device.executors.futures.runner import Fallback
from tokenspeed.device.executors.streams import stream_executor
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import Executor, StreamDeviceHandle
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.plane.messages import SamplingParams
from tokenspeed.plane.plan import Dispatch, ExecutionPlan
from tokenspeed.plane.ports import Ticket
from tokenspeed.plane.results import ForwardResult
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.settings.load import load_settings
from tokenspeed.settings.model import DeviceSettings, SchedulerSettings, Settings
from tokenspeed.telemetry.meters import NullMeter
from tokenspeed.testing import hash_continuation


@attrs.frozen(eq=False)
class Rank:
    rig: Rig
    plane: HostDataPlane
    executor: Executor
    log: FlowLog

    @property
    def steps(self) -> tuple[int, int]:
        assert isinstance(self.executor, FuturesExecutor)
        state = self.executor.runner.state
        return state.async_steps, state.sync_fallback_steps


@contextmanager
def rank(
    specs: DeviceSpecs = SPECS,
    *,
    futures: bool = True,
    overlap: bool = True,
    asynchronous: bool = True,
    step_s: float = 0.0,
    **parts: object,
) -> Iterator[Rank]:
    """A rank over a simulated device."""
    work, log = Work(), FlowLog()
    backend = open_simulated_backend(work=work)
    model = SimulatedModel(
        work=work, time=FixedStep(step_s), weight_bytes=0, vocab_size=specs.vocab_size, seed=0, max_tokens=512
    )
    bound = model.bind(None, num_pages=specs.num_pages, page_tokens=specs.page_tokens)
    shape = {
        "backend": backend,
        "step": bound.step,
        "pool": bound.pool,
        "sampler": SimulatedSampler(),
        "logprobs": SimulatedLogprobs(vocab_size=specs.vocab_size),
        "request_slots": specs.request_slots,
        "max_model_len": specs.max_model_len,
        "num_pages": specs.num_pages,
        "groups": specs.groups,
    }

    def make() -> Executor:
        if not futures:
            return stream_executor(**shape)
        buckets = powers_of_two(specs.max_num_seqs)
        return futures_executor(**shape, asynchronous=asynchronous, buckets=buckets, log=log)

    handle = StreamDeviceHandle(
        backend=backend,
        executor=(executor := on_stream(backend.exec_stream, make, "make")),
        profiler=TraceProfiler(stream=backend.exec_stream),
        rounds=AutomaticCollection(),
    )
    plane = open_data_plane(handle, CountingWakeup(), check=Strict())
    try:
        settings = Settings(
            device=DeviceSettings(async_scheduling=asynchronous),
            scheduler=SchedulerSettings(overlap=overlap, chunk_tokens=32, max_waiting=64),
        )
        watched = parts.pop("plane", lambda inner: inner)(plane)
        yield Rank(hand_rig(specs=specs, settings=settings, plane=watched, **parts), plane, executor, log)
    finally:
        plane.close()


@attrs.frozen(eq=False)
class StepMeter(NullMeter):
    """Adds up what forwards and retractions are reported."""

    seen: Counter[str] = attrs.field(factory=Counter)

    def preempted(self, count: int) -> None:
        self.seen["retracted"] += count

    def committed(self, **values: int) -> None:
        self.seen.update(values)


MODES = {
    "streams-depth-0": {"futures": False, "overlap": False},
    "streams-depth-1": {"futures": False},
    "futures-depth-0": {"overlap": False},
    "futures-depth-1": {},
    "futures-sync": {"asynchronous": False},
}


def history(seed: int, pages: int, meter: StepMeter, **mode: bool) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """(tokens, tokens expected) of random requests, of which some are aborted at random rounds."""
    draw = random.Random(seed)
    system = [draw.randrange(1000) for _ in range(40)]
    prompts = {
        f"r{i}": system * draw.randint(0, 1) + [draw.randrange(1000) for _ in range(draw.randint(1, 60))]
        for i in range(16)
    }
    lengths = {rid: draw.randint(1, 40) for rid in prompts}
    leaving = {rid for rid in prompts if draw.random() < 0.2}
    waiting, live = list(prompts), []
    with rank(attrs.evolve(SPECS, num_pages=pages), meter=meter, **mode) as made:
        rig = made.rig
        while waiting:
            arriving = [waiting.pop() for _ in range(min(len(waiting), draw.randint(0, 3)))]
            rig.put(*(request(rid, prompts[rid], max_new=lengths[rid]) for rid in arriving))
            live += [rid for rid in arriving if rid in leaving]
            if live and draw.random() < 0.5:
                rig.abort(live.pop(draw.randrange(len(live))))
            rig.rounds(draw.randint(1, 6))
        rig.settle()
        got = {rid: rig.link.tokens(rid) for rid in prompts}
    want = {rid: hash_continuation(p, lengths[rid], vocab_size=SPECS.vocab_size) for rid, p in prompts.items()}
    return got, {rid: tokens[: len(got[rid])] if rid in leaving else tokens for rid, tokens in want.items()}


@pytest.mark.contract("AF-6", "AF-28", "AF-57", "AF-67", "DO-5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pages", [65, 13], ids=["roomy", "tight"])
def test_random_arrivals_and_aborts_get_the_same_tokens_with_every_executor_and_depth(mode: str, pages: int) -> None:
    meter = StepMeter()
    for seed in range(5):
        got, want = history(seed, pages, meter, **MODES[mode])
        assert got == want, seed
    assert (meter.seen["retracted"] > 0) == (pages == 13)
    asynchronous = mode in ("futures-depth-0", "futures-depth-1")
    assert (meter.seen["async_steps"] > 0) == asynchronous
    assert (meter.seen["sync_fallback_steps"] > 0) == asynchronous


def steady_share(length: int) -> float:
    with rank(attrs.evolve(SPECS, num_pages=257)) as made:
        for i in range(8):
            made.rig.put(request(f"r{i}", [1, 2, 3, i], max_new=length))
        made.rig.settle()
        asynchronous, fallbacks = made.steps
    return asynchronous / (asynchronous + fallbacks)


@pytest.mark.contract("AF-8")
def test_long_answers_stay_in_the_asynchronous_flow_and_short_ones_pay_for_changes() -> None:
    assert steady_share(200) >= 0.95
    assert steady_share(4) < steady_share(200)


@pytest.mark.contract("AF-52", "AF-53", "AF-57")
def test_ordinary_traffic_meets_every_reason_to_break_the_flow_but_a_new_order() -> None:
    """With the real scheduler's batches, which keep the order of an unchanged batch; `test_futures_tokens` shuffles."""
    reached: Counter[Fallback] = Counter()
    for seed in range(6):
        with rank(attrs.evolve(SPECS, num_pages=20)) as made:
            draw = random.Random(seed)
            for i in range(12):
                made.rig.put(request(f"r{i}", [i + 1] * draw.randint(1, 70), max_new=draw.randint(1, 30)))
                made.rig.rounds(draw.randint(1, 5))
            made.rig.settle()
            assert isinstance(made.executor, FuturesExecutor)
            reached += made.executor.runner.state.fallbacks
    assert set(reached) == set(Fallback) - {Fallback.REMAP}


@pytest.mark.contract("AF-3")
def test_async_scheduling_is_on_unless_the_switch_says_no() -> None:
    assert load_settings().device.async_scheduling
    for asynchronous in (True, False):
        with rank(asynchronous=asynchronous) as made:
            made.rig.put(request("a", [1, 2, 3], max_new=12))
            made.rig.settle()
            assert (made.steps[0] > 0) == asynchronous
            assert (made.steps[1] > 0) == asynchronous


@pytest.mark.contract("AF-68", "DO-2")
@pytest.mark.parametrize(
    ("overlap", "asynchronous", "depth"), [(True, True, 1), (False, True, 0), (True, False, 0), (False, False, 0)]
)
def test_either_switch_gives_depth_zero(overlap: bool, asynchronous: bool, depth: int) -> None:
    settings = Settings(
        device=DeviceSettings(async_scheduling=asynchronous), scheduler=SchedulerSettings(overlap=overlap)
    )
    assert settings.in_flight_depth == depth


@attrs.define(eq=False)
class WatchedPlane:
    """A data plane in front of another; notes what the control thread asks of it in the flow's log."""

    inner: HostDataPlane
    log: list[tuple[str, int]] = attrs.field(factory=list)
    in_flight: int = 0
    most: int = 0

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch) -> Ticket:
        ticket = self.inner.execute(plan, dispatch)
        if plan.batch is not None:
            self.log.append(("enqueue", int(ticket)))
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        return ticket

    def commit(self, ticket: Ticket) -> ForwardResult:
        result = self.inner.commit(ticket)
        self.log.append(("output", int(ticket)))
        self.in_flight -= 1
        return result

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.contract("AF-27", "AF-68", "AF-5")
def test_the_queue_holds_two_and_the_next_step_is_enqueued_before_an_output_is_taken() -> None:
    planes: list[WatchedPlane] = []

    def watch(inner: HostDataPlane) -> WatchedPlane:
        planes.append(WatchedPlane(inner))
        return planes[0]

    with rank(plane=watch) as made:
        made.rig.put(request("a", [1, 2, 3], max_new=10))
        made.rig.settle()
    log, (plane,) = planes[0].log, planes
    assert plane.most == 2
    numbers = [ticket for what, ticket in log if what == "output"]
    assert len(numbers) == 10
    for now, following in itertools.pairwise(numbers):
        assert log.index(("enqueue", following)) < log.index(("output", now))
    for first, third in zip(numbers[:-2], numbers[2:], strict=True):
        assert log.index(("output", first)) < log.index(("enqueue", third))


@pytest.mark.contract("AF-13", "AF-68")
def test_without_async_scheduling_a_step_ends_before_the_next_begins() -> None:
    planes: list[WatchedPlane] = []

    def watch(inner: HostDataPlane) -> WatchedPlane:
        planes.append(WatchedPlane(inner))
        return planes[0]

    with rank(plane=watch, asynchronous=False) as made:
        made.rig.put(request("a", [1, 2, 3], max_new=3))
        made.rig.settle()
        stages = [(s.name, s.thread) for s in made.log.of(Stage)]
    assert planes[0].most == 1
    assert [what for what, _ in planes[0].log] == ["enqueue", "output"] * 3
    step = [
        "update_states",
        "prepare_model_input",
        "forward",
        "bookkeeping_sync",
        "sample",
        "generate_model_runner_output",
        "output",
    ]
    assert [name for name, _ in stages] == step * 3
    assert {thread for _, thread in stages} == {THREAD_NAME}


@pytest.mark.contract("AF-23", "AF-67", "AF-26", "AF-5")
def test_outputs_are_materialised_on_the_output_thread_and_reach_the_client_step_by_step() -> None:
    with rank() as made:
        made.rig.put(request("a", [1, 2, 3], max_new=10))
        made.rig.settle()
        outputs = [stage for stage in made.log.of(Stage) if stage.name == "output"]
        batches = [batch for batch in made.rig.link.sent if "a" in batch.rids]
        assert {stage.thread for stage in outputs} == {OUTPUT_THREAD}
        assert [len(batch.output_ids[batch.rids.index("a")]) for batch in batches] == [1] * 10
        alive = [thread.name for thread in threading.enumerate()]
        assert OUTPUT_THREAD in alive
    assert OUTPUT_THREAD not in [thread.name for thread in threading.enumerate()]


@pytest.mark.contract("AF-70")
def test_the_workers_copies_agree_with_the_committed_tokens_after_every_round() -> None:
    """Also across retractions: the pool is tight."""
    meter, compared = StepMeter(), 0
    with rank(attrs.evolve(SPECS, num_pages=14), meter=meter) as made:
        rig, table = made.rig, made.rig.loop.table
        prompts = {f"r{i}": [i + 1] * (20 + 7 * i) for i in range(6)}
        rig.put(*(request(rid, prompt, max_new=40) for rid, prompt in prompts.items()))
        for _ in range(600):
            progress = rig.loop.round()
            state = made.executor.runner.batch.state
            with state.lock:
                for rid, row in table.by_rid.items():
                    committed, mine = rig.link.tokens(rid), state.requests.get(row)
                    if mine is not None and committed:
                        assert mine.output_token_ids[: len(committed)] == committed
                        compared += 1
            if not progress:
                break
    assert compared > 100
    assert meter.seen["retracted"] > 0


@pytest.mark.contract("AF-38", "AF-44")
def test_an_end_on_a_stop_token_breaks_the_flow_two_steps_later_and_one_by_length_at_once() -> None:
    prompts = {"long": [9, 9, 9], "short": [1, 2, 3]}
    tokens = hash_continuation(prompts["short"], 20, vocab_size=SPECS.vocab_size)
    assert tokens[5] not in tokens[:5]
    for stop, late in ((True, 1), (False, 0)):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(tokens[5],) if stop else ())
        with rank() as made:
            made.rig.put(
                request("long", prompts["long"], max_new=20),
                request("short", prompts["short"], max_new=20 if stop else 6, sampling=sampling),
            )
            made.rig.settle()
            details = [s.detail for s in made.log.of(Stage) if s.name in ("update_states", "materialize")]
            steps = [i for i, d in enumerate(details) if d == "batch composition changed"]
            before = details[: steps[0]].count("")
            breaks = details.count("batch composition changed")
            assert len(made.rig.link.tokens("short")) == 6
        # The short one's last token comes from step 6; by length it is in no later step, by a stop
        # token it is in the step that was dispatched before its token was known.
        assert (before, breaks) == (6 + late, 1)


def test_a_failure_of_the_device_surfaces_at_the_commit_and_the_threads_end() -> None:
    with rank() as made:
        assert isinstance(made.executor, FuturesExecutor)
        made.rig.put(request("a", [1, 2, 3], max_new=4))

        def fault() -> None:
            raise ZeroDivisionError

        made.executor.runtime.queue(fault, "fault")
        with pytest.raises(ZeroDivisionError):
            made.rig.settle()
    left = [thread for thread in threading.enumerate() if thread.name in (OUTPUT_THREAD, THREAD_NAME)]
    for thread in left:
        thread.join(TIMEOUT_S)
    assert [thread.name for thread in left if thread.is_alive()] == []
