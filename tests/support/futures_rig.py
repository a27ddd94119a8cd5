"""The futures executor with a hash model: over the CPU's device thread, or over a simulated device moved by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch
from device_doubles import cpu_backend
from sim_rig import HandDevice, hand_device
from toy_rig import MAX_LEN, PAGE_TOKENS, PAGES, SLOTS, VOCAB, toy_logprobs

from tokenspeed.device.backends.base import Backend
from tokenspeed.device.backends.cpu import CpuBackend
from tokenspeed.device.backends.simulated_model import SimulatedLogprobs, SimulatedModel, SimulatedSampler
from tokenspeed.device.backends.simulated_roofline import FixedStep
from tokenspeed.device.executors.futures.executor import FuturesExecutor, futures_executor
from tokenspeed.device.executors.futures.output import OUTPUT_THREAD, AsyncModelRunnerOutput
from tokenspeed.device.executors.futures.runtime import DeviceFuture
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import StreamDeviceHandle
from tokenspeed.device.handle import cache_ops_from_plan as adapt
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.toy import ToyModel, ToySampler
from tokenspeed.plane.plan import BlockGrants, Dispatch, ExecutionPlan, ForwardBatch, LogprobPlan, Seat
from tokenspeed.plane.ports import Landing

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

    def stage(self, name: str, detail: str) -> None:
        self.events.append(Stage(threading.current_thread().name, name, detail))
        self.at_stage(name)

    def launched(self, label: str, inputs: tuple[DeviceFuture, ...], output: DeviceFuture) -> None:
        self.events.append(Launch(label, inputs, output))

    def moved(self, what: str, *, blocking: bool) -> None:
        self.events.append(Moved(what, blocking))

    def touched(self, future: DeviceFuture, why: str) -> None:
        self.events.append(Touch(threading.current_thread().name, future, why, future.resolved()))

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


SHAPE = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN, "num_pages": PAGES, "page_tokens": PAGE_TOKENS}


@contextmanager
def sim_futures(step_s: float = STEP_S, **options: object) -> Iterator[FuturesRig]:
    """Over a simulated device whose clock the test moves: nothing resolves until it does."""
    log = FlowLog()
    with hand_device() as device:
        model = SimulatedModel(
            work=device.work, time=FixedStep(step_s), weight_bytes=0, vocab_size=VOCAB, seed=0, max_tokens=256
        )
        bound = model.bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
        executor = futures_executor(
            backend=device.backend,
            step=bound.step,
            pool=bound.pool,
            logprobs=SimulatedLogprobs(vocab_size=VOCAB),
            **{"sampler": SimulatedSampler(), "log": log, **SHAPE, **options},
        )
        handle = _handle(device.backend, executor)
        try:
            yield FuturesRig(executor, handle, device.backend, log, device)
        finally:
            handle.close()


__all__ = [
    "OUTPUT_THREAD",
    "AsyncModelRunnerOutput",
    "CpuBackend",
    "FlowLog",
    "FuturesRig",
    "Launch",
    "Moved",
    "Stage",
    "Touch",
    "cpu_futures",
    "sim_futures",
    "torch",
]
