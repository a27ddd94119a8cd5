"""The worker's model runner: the asynchronous flow of a step, where it breaks, and how it comes back.

In steady state step N + 1 takes the unresolved sampled-token future of step N as its input ids, and
the host waits for neither. Where that future does not fit, the forward thread materialises the
output of step N itself, before it goes on: a registered exception to the rule that this thread never
waits for the device, counted by `RunnerState.sync_fallback_steps` and absent in steady state. The
flow returns by itself, since every step leaves its future behind.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import attrs
import numpy as np
import torch

from tokenspeed.device.executors.futures.batch_state import InputBatch, Sampled, SchedulerOutput
from tokenspeed.device.executors.futures.buffer import ExecutionBuffer
from tokenspeed.device.executors.futures.device_step import DeviceStep, Executed
from tokenspeed.device.executors.futures.model_input import InputBuilder, InputIds, ModelInput
from tokenspeed.device.executors.futures.output import AsyncModelRunnerOutput
from tokenspeed.device.executors.futures.runtime import DeviceFuture
from tokenspeed.device.executors.landing import Outputs, StreamLanding
from tokenspeed.device.host_sync import allow_host_sync
from tokenspeed.device.sampling.base import TokenMasks
from tokenspeed.device.step import LayersReady
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.results import ForwardResult
from tokenspeed.plane.table import Int64Array

HostSync: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Marks a wait of the forward thread that is allowed; the argument says why it happens."""


class Fallback(enum.Enum):
    """Why a step took its input ids from the host."""

    FIRST = "no step before"
    COMPOSITION = "batch composition changed"
    NOT_DECODE = "not all rows decode"
    SHAPE = "async future shape/dtype mismatch"
    REMAP = "order of the batch changed"


@attrs.define(eq=False)
class RunnerState:
    """Writer: ModelRunner, on ``ts-forward``; the counters may be read from anywhere.

    Attributes:
        execute_model_state: between the two halves of a step.
        fell_back: of the step that runs; None: it is asynchronous, or the flow is synchronous.
    """

    execute_model_state: Executed | None = None
    batch_composition_changed: bool | None = None
    async_steps: int = 0
    sync_fallback_steps: int = 0
    fallbacks: Counter[Fallback] = attrs.field(factory=Counter[Fallback])
    fell_back: Fallback | None = None


def not_watched(why: str) -> AbstractContextManager[None]:
    """A `HostSync` where nobody watches for waits."""
    del why
    return nullcontext()


@attrs.frozen(kw_only=True, eq=False)
class ModelRunner:
    """Runs a step in two halves, `execute_model` and `sample_tokens`; ``ts-forward`` only.

    Attributes:
        asynchronous: False: each transfer blocks, and a step has its tokens when it returns.
    """

    batch: InputBatch
    builder: InputBuilder
    device: DeviceStep
    buffer: ExecutionBuffer
    asynchronous: bool
    host_sync: HostSync = not_watched
    state: RunnerState = attrs.field(factory=RunnerState)

    def execute_model(self, output: SchedulerOutput, ready: LayersReady) -> None:
        """Bring the batch state up to date, choose the input ids, launch the forward."""
        state = self.state
        if state.execute_model_state is not None:
            raise InvariantBroken("a step began before the one before was sampled")
        if self.asynchronous:
            self._break_on_composition_change(output)
        self._note("update_states")
        self.batch.update_states(output)
        inputs = self._prepare(output)
        if self.asynchronous:
            inputs = self._choose_input_ids(output, inputs)
        self._note("forward")
        state.execute_model_state = self.device.forward(inputs, ready, blocking=not self.asynchronous)

    def sample_tokens(self, grammar_output: TokenMasks | None = None) -> AsyncModelRunnerOutput:
        """Launch sampling for the forward of `execute_model`; the output is unresolved in the asynchronous flow.

        `grammar_output`: filled masks of the rows that grammars hold.
        """
        state = self.state
        executed, state.execute_model_state = state.execute_model_state, None
        if executed is None:
            raise InvariantBroken("sampling without a forward")
        self._note("bookkeeping_sync")
        sampled = self._snapshot(executed)
        self._note("sample")
        outputs = Outputs()
        future = self.device.sample(executed, outputs, grammar_output)
        self._note("generate_model_runner_output")
        landing = StreamLanding(event=future.event, prepared=executed.inputs.prepared, outputs=outputs)
        wrapped = AsyncModelRunnerOutput(
            future=future,
            read=self._reader(landing, executed),
            sampled=sampled,
            batch=self.batch,
            log=self.device.runtime.log,
        )
        if self.asynchronous:
            self.buffer.store(future, executed.inputs.req_ids, wrapped)
        else:
            with allow_host_sync():  # what switching asynchronous scheduling off means
                wrapped.get_output()
                wrapped.done.wait()
        return wrapped

    # ---- before the batch state moves ---------------------------------------------------------

    def _break_on_composition_change(self, output: SchedulerOutput) -> None:
        """The guard. It comes first, because adding a request copies the tokens known of it."""
        if self.buffer.futures_sampled_token_ids is None:
            self.state.batch_composition_changed = False
            return
        before, now = self.buffer.prev_req_ids_ordered, output.req_ids
        changed = before is None or (before != now and frozenset(before) != frozenset(now))
        self.state.batch_composition_changed = changed
        if changed:
            self._materialize_pending_async_output(Fallback.COMPOSITION.value)

    def _materialize_pending_async_output(self, why: str) -> bool:
        """Force the output of the step before on this thread; False if there is none.

        True also if the output thread was faster: the batch state may have changed since it was read.
        """
        pending = self.buffer.async_output
        if pending is None:
            return False
        self._note("materialize", why)
        with self.host_sync(why):
            pending.get_output()
            pending.done.wait()
        return True

    # ---- which ids the forward takes ----------------------------------------------------------

    def _choose_input_ids(self, output: SchedulerOutput, inputs: ModelInput) -> ModelInput:
        """The future of the step before, if it fits; else ids of the host, which are true ones then."""
        state, future = self.state, self.buffer.futures_sampled_token_ids
        fallback = self._why_not(future, inputs)
        if future is None or fallback is not None:
            if fallback is Fallback.SHAPE and self._materialize_pending_async_output(fallback.value):
                inputs = self._prepare(output)
            elif inputs.stale:  # a decode row beside a prompt: its token is in the pending output
                self._materialize_pending_async_output(str(fallback and fallback.value))
                inputs = self._prepare(output)
            if inputs.stale:
                raise InvariantBroken("input ids that neither host nor device has", requests=inputs.req_ids)
        else:
            ids, broke_async = self._maybe_remap_async_future(future, inputs)
            inputs = attrs.evolve(inputs, input_ids=ids, stale=False)
            fallback = Fallback.REMAP if broke_async else None
        state.fell_back = fallback
        if fallback is None:
            state.async_steps += 1
        else:
            state.sync_fallback_steps += 1
            state.fallbacks[fallback] += 1
        return inputs

    def _why_not(self, future: DeviceFuture | None, inputs: ModelInput) -> Fallback | None:
        """The swap decision: None only if all four conditions hold."""
        if future is None:
            return Fallback.FIRST
        if self.state.batch_composition_changed:
            return Fallback.COMPOSITION
        if not inputs.is_decode:
            return Fallback.NOT_DECODE
        if future.shape != (inputs.num_tokens,) or future.dtype != torch.int64:
            return Fallback.SHAPE
        return None

    def _maybe_remap_async_future(self, future: DeviceFuture, inputs: ModelInput) -> tuple[InputIds, bool]:
        """The future itself if its order is this batch's; else its values in this order, waited for."""
        before = self.buffer.prev_req_ids_ordered
        if before is None or before == inputs.req_ids:
            return future, False
        with self.host_sync(Fallback.REMAP.value):
            values = future.to_host(Fallback.REMAP.value)
        at = {req_id: i for i, req_id in enumerate(before)}
        remapped: Int64Array = values.astype(np.int64)  # a copy; padding stays where it is
        remapped[: len(before)] = values[[at[req_id] for req_id in inputs.req_ids]]
        return remapped, True

    # ---- parts of a step ----------------------------------------------------------------------

    def _prepare(self, output: SchedulerOutput) -> ModelInput:
        self._note("prepare_model_input")
        return self.builder.prepare_model_input(output)

    def _snapshot(self, executed: Executed) -> Sampled:
        requests, prepared = self.batch.state.company.requests, executed.inputs.prepared
        if len(prepared.sampled) < len(requests):
            requests = tuple(requests[i] for i in prepared.sampled.tolist())
        return Sampled(requests=requests, positions=prepared.sampled_positions)

    def _reader(self, landing: StreamLanding, executed: Executed) -> Callable[[], ForwardResult]:
        fallback, asynchronous = self.state.fell_back, self.asynchronous

        def read() -> ForwardResult:
            result = landing.result()
            return attrs.evolve(
                result,
                device_s=result.device_s + executed.forward.event.busy_s,
                async_steps=int(asynchronous and fallback is None),
                sync_fallback_steps=int(asynchronous and fallback is not None),
            )

        return read

    def _note(self, stage: str, detail: str = "") -> None:
        self.device.runtime.log.stage(stage, detail)
