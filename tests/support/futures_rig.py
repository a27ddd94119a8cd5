"""The futures executor with a hash model: over the CPU's device thread, or over a simulated device moved by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch
from device_doubles import DECODE, batch, cpu_backend, granted, seat
from sim_rig import HandDevice, hand_device
from toy_rig import MAX_LEN, PAGE_TOKENS, PAGES, SLOTS, VOCAB, toy_logprobs

from tokenspeed.device.backends.base import Backend
from tokenspeed.device.backends.simulated_model import (
    SimulatedLogprobs,
    SimulatedModel,
    SimulatedSampler,
    SimulatedStep,
)
from tokenspeed.device.backends.simulated_roofline import FixedStep
from tokenspeed.device.executors.futures.executor import FuturesExecutor, futures_executor
from tokenspeed.device.executors.futures.runtime import DeviceFuture
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import StreamDeviceHandle
from tokenspeed.device.handle import cache_ops_from_plan as adapt
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.step import RaggedRows
from tokenspeed.device.toy import ToyModel, ToySampler
from tokenspeed.plane.plan import BlockGrants, Dispatch, ExecutionPlan, ForwardBatch, LogprobPlan, Seat
from tokenspeed.plane.ports import Landing
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.testing import hash_continuation

STEP_S = 0.020


@attrs.frozen
class Launch:
    label: str
    inputs: tuple[DeviceFuture, ...]
    output: DeviceFuture


@attrs.frozen
class Touch:
    """A thread waits for a future."""

    thread: str
    future: DeviceFuture
    why: str
    resolved: bool


@attrs.frozen
class Stage:
    thread: str
    name: str
    detail: str


@attrs.frozen
class Moved:
    what: str
    blocking: bool


@attrs.define(eq=False)
class FlowLog:
    """`FuturesLog` that keeps everything in the order of happening."""

    events: list[object] = attrs.field(factory=list)
    at_stage: Callable[[str], None] = lambda _name: None
    at_touch: Callable[[DeviceFuture], None] = lambda _future: None

    def stage(self, name: str, detail: str) -> None:
        self.events.append(Stage(threading.current_thread().name, name, detail))
        self.at_stage(name)

    def launched(self, label: str, inputs: tuple[DeviceFuture, ...], output: DeviceFuture) -> None:
        self.events.append(Launch(label, inputs, output))

    def moved(self, what: str, *, blocking: bool) -> None:
        self.events.append(Moved(what, blocking))

    def touched(self, future: DeviceFuture, why: str) -> None:
        self.events.append(Touch(threading.current_thread().name, future, why, future.resolved()))
        self.at_touch(future)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def launches(self, label: str) -> list[Launch]:
        return [launch for launch in self.of(Launch) if launch.label == label]

    def stages(self, *names: str) -> list[str]:
        return [stage.name for stage in self.of(Stage) if not names or stage.name in names]

    def waits_here(self) -> list[Touch]:
        """Waits of the worker's main thread, which is the test's."""
        return [touch for touch in self.of(Touch) if touch.thread == threading.current_thread().name]

    def clear(self) -> None:
        self.events.clear()


@attrs.frozen(eq=False)
class FuturesRig:
    executor: FuturesExecutor
    handle: StreamDeviceHandle
    backend: Backend
    log: FlowLog
    device: HandDevice | None
    step: RecordingStep | None = None
    syncs: list[str] | None = None

    def submit(
        self,
        batch: ForwardBatch | None = None,
        *,
        seats: tuple[Seat, ...] = (),
        grants: tuple[BlockGrants, ...] = (),
        logprobs: LogprobPlan | None = None,
        **streams: object,
    ) -> Landing:
        plan = ExecutionPlan(round_id=1, batch=batch, grants=grants, **streams)
        return self.handle.execute(plan, Dispatch(seats=seats, logprobs=logprobs or LogprobPlan()), adapt(plan).device)

    @property
    def state(self) -> object:
        return self.executor.runner.state

    @property
    def counters(self) -> tuple[int, int]:
        """(asynchronous steps, fallback steps)"""
        return self.state.async_steps, self.state.sync_fallback_steps

    @property
    def buffer(self) -> object:
        return self.executor.runner.buffer

    def hold(self) -> None:
        self.backend.exec_stream.hold()

    def release(self) -> None:
        self.backend.exec_stream.release()

    def tokens_of(self, slot: int, count: int) -> list[int]:
        """``token_ids_cpu`` of a slot."""
        import numpy as np

        positions = np.arange(count)
        return self.executor.runner.batch.tokens_at(np.full(count, slot), positions).tolist()

    def output_ids(self, row: int) -> list[int]:
        return list(self.executor.runner.batch.state.requests[row].output_token_ids)


def _handle(backend: Backend, executor: FuturesExecutor) -> StreamDeviceHandle:
    return StreamDeviceHandle(
        backend=backend,
        executor=executor,
        profiler=TraceProfiler(stream=backend.exec_stream),
        rounds=AutomaticCollection(),
    )


@contextmanager
def cpu_futures(**options: object) -> Iterator[FuturesRig]:
    """Over the CPU's exec thread, with the toy model; `rig.hold()` keeps the device busy."""
    log = FlowLog()
    with cpu_backend() as backend:

        def make() -> FuturesExecutor:
            bound = ToyModel(vocab_size=VOCAB).bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
            return futures_executor(
                backend=backend,
                step=bound.step,
                pool=bound.pool,
                logprobs=toy_logprobs,
                **{"sampler": ToySampler(), "log": log, **SHAPE, **options},
            )

        executor = on_stream(backend.exec_stream, make, "make")
        handle = _handle(backend, executor)
        try:
            yield FuturesRig(executor, handle, backend, log, None)
        finally:
            handle.close()


SHAPE = {
    "request_slots": SLOTS,
    "max_model_len": MAX_LEN,
    "num_pages": PAGES,
    "groups": (CacheGroupSpec(block_tokens=PAGE_TOKENS),),
}


@contextmanager
def sim_futures(step_s: float = STEP_S, **options: object) -> Iterator[FuturesRig]:
    """Over a simulated device whose clock the test moves: nothing resolves until it does.

    Where the worker's main thread waits, the clock goes to the end of what is queued, so that the
    test's one thread never waits for itself; `rig.syncs` has the reasons of allowed waits.
    """
    log, syncs = FlowLog(), []
    with hand_device() as device:

        @contextmanager
        def host_sync(why: str) -> Iterator[None]:
            syncs.append(why)
            device.advance_to_end()
            yield

        def at_touch(_future: DeviceFuture) -> None:
            if threading.current_thread() is threading.main_thread():
                device.advance_to_end()

        log.at_touch = at_touch
        model = SimulatedModel(
            work=device.work, time=FixedStep(step_s), weight_bytes=0, vocab_size=VOCAB, seed=0, max_tokens=256
        )
        bound = model.bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
        executor = futures_executor(
            backend=device.backend,
            step=(step := RecordingStep(bound.step)),
            pool=bound.pool,
            logprobs=SimulatedLogprobs(vocab_size=VOCAB),
            **{"sampler": SimulatedSampler(), "log": log, "host_sync": host_sync, **SHAPE, **options},
        )
        handle = _handle(device.backend, executor)
        try:
            yield FuturesRig(executor, handle, device.backend, log, device, step, syncs)
        finally:
            handle.close()


@attrs.define(eq=False)
class RecordingStep:
    """`ForwardStep` in front of another; keeps the ids that each forward was given."""

    inner: SimulatedStep
    ids: list[list[int]] = attrs.field(factory=list)

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def run(self, rows: RaggedRows, **arguments: object) -> torch.Tensor:
        self.ids.append(rows.token_ids.tolist())
        return self.inner.run(rows, **arguments)


PROMPTS = {0: [3, 1, 4], 1: [1, 5, 9, 2], 2: [6, 5], 3: [3, 5, 8, 9, 7]}
BLOCKS = MAX_LEN // PAGE_TOKENS


@attrs.define(eq=False)
class Driver:
    """Plays the control plane by hand: slots are requests, `at` is where each is in its sequence."""

    rig: FuturesRig
    at: dict[int, int] = attrs.field(factory=dict)

    def submit(self, *slots: int, joining: tuple[int, ...] = ()) -> Landing:
        """A forward of `slots` in that order; those in `joining` with their whole prompt, the others by a token."""
        rows = []
        for slot in slots:
            start = 0 if slot in joining else self.at[slot]
            tokens = PROMPTS[slot] if slot in joining else DECODE
            rows.append((slot, start, tokens))
            self.at[slot] = start + len(tokens)
        blocks = [(slot, i, 1 + slot * BLOCKS + i) for slot in joining for i in range(BLOCKS)]
        return self.rig.submit(
            batch(*rows),
            seats=tuple(seat(slot, prompt_len=len(PROMPTS[slot])) for slot in joining),
            grants=granted(*blocks) if blocks else (),
        )

    def prefill(self, *slots: int) -> Landing:
        return self.submit(*slots, joining=slots)

    def finish(self, landing: Landing) -> list[int]:
        """Let the simulated device get there, and commit."""
        if self.rig.device is not None:
            self.rig.device.advance(10.0)
        return landing.result().tokens

    def end(self, *slots: int) -> None:
        self.rig.handle.release(slots, slots)

    def truth(self, *slots: int) -> list[int]:
        """The true last tokens: what the latest forward of these slots had to take in."""
        return [self.sequence(slot, self.at[slot])[-1] for slot in slots]

    def sequence(self, slot: int, length: int) -> list[int]:
        prompt = PROMPTS[slot]
        return prompt + hash_continuation(prompt, max(0, length - len(prompt)), vocab_size=VOCAB)


def drive(rig: FuturesRig) -> Driver:
    return Driver(rig)
