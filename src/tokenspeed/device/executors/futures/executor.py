"""`device.handle.Executor` over device futures, and how one is put together."""

from __future__ import annotations

from functools import partial

import attrs

from tokenspeed.device.backends.base import Backend
from tokenspeed.device.executors.futures.batch_state import input_batch
from tokenspeed.device.executors.futures.buffer import ExecutionBuffer, LastStep
from tokenspeed.device.executors.futures.device_step import DeviceStep
from tokenspeed.device.executors.futures.model_input import HostInputs, InputBuilder
from tokenspeed.device.executors.futures.output import OutputLoop, open_output_loop
from tokenspeed.device.executors.futures.runner import HostSync, ModelRunner, not_watched
from tokenspeed.device.executors.futures.runtime import FuturesLog, FuturesRuntime, NoLog
from tokenspeed.device.executors.landing import NoForwardLanding
from tokenspeed.device.executors.ports import BlockPool, Logprobs, SlotStates
from tokenspeed.device.executors.slot_states import TokensOnHost
from tokenspeed.device.executors.slots import slot_state
from tokenspeed.device.grammar_fill import Filler
from tokenspeed.device.sampling.base import Sampler
from tokenspeed.device.step import ForwardStep, LayersReady
from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.plane.grammar import GrammarMatchers, NoMatchers
from tokenspeed.plane.plan import BlockCopy, BlockGrants, Dispatch, ForwardBatch, GroupBlocks, Seat
from tokenspeed.plane.ports import Landing
from tokenspeed.plane.specs import CacheGroupSpec


@attrs.define(eq=False)
class EndedRows:
    """Writer: FuturesExecutor. Rows that ended since the last step, told to the runner with the next one."""

    rows: list[int] = attrs.field(factory=list[int])

    def take(self) -> tuple[int, ...]:
        rows, self.rows = tuple(self.rows), []
        return rows


@attrs.frozen(kw_only=True, eq=False)
class FuturesExecutor:
    """Each forward is one step of the runner; its landing is the completion of its ``get_output()``."""

    runner: ModelRunner
    outputs: OutputLoop
    pool: BlockPool
    filler: Filler = attrs.field(factory=lambda: Filler(NoMatchers()))
    ended: EndedRows = attrs.field(factory=EndedRows)

    @property
    def runtime(self) -> FuturesRuntime:
        return self.runner.device.runtime

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        if copies:
            self.runtime.queue(partial(self.pool.copy_blocks, copies), "copy")

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        if blocks:
            self.runtime.queue(partial(self.pool.zero_blocks, blocks), "zero")

    def forward(
        self, batch: ForwardBatch | None, grants: tuple[BlockGrants, ...], dispatch: Dispatch, ready: LayersReady
    ) -> Landing:
        """One step: `execute_model`, `sample_tokens`, and the output on its way to the output thread.

        Raises: InvariantBroken: plan and batch state contradict each other, or the dispatch carries
            inputs of a feature this build does not have.
        """
        if dispatch.histories or dispatch.ngram_windows or (dispatch.grammars and not dispatch.grammars.eager):
            raise InvariantBroken("a dispatch for a feature that was not built", dispatch=dispatch)
        if dispatch.seats:
            self.runtime.queue(partial(self._seat, dispatch.seats), "seat")
        if batch is None:
            self.runner.batch.seat(dispatch.seats, grants, self.ended.take())
            # No later plan's forward waits for this plan's load: the fence does.
            last_layer = self.runner.device.step.num_layers - 1
            return NoForwardLanding(event=self.runtime.queue(partial(ready.wait_for, last_layer), "fence"))
        output = self.runner.batch.view(batch, grants, dispatch, self.ended.take())
        # The queue is drained (DO-10): the matchers know every token, the masks are true of this step.
        masks = self.filler.fill(dispatch.grammars, batch.samples.nonzero()[0]) if dispatch.grammars else None
        self.runner.execute_model(output, ready)
        landing = self.runner.sample_tokens(masks)
        if self.runner.asynchronous:
            self.outputs.handle_output(landing)
        return landing

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Ended requests: the sampler forgets them behind their forwards, the runner with its next step."""
        batch = self.runner.batch
        self.ended.rows.extend(rows)
        vacated = tuple(slot for row, slot in zip(rows, slots, strict=True) if batch.slots.vacate(row, slot))
        if vacated:
            self.runtime.queue(partial(self._release, vacated), "release")
        if batch.state.requests.keys() <= set(self.ended.rows):
            self.runner.buffer.clear()  # nobody is left whom a future could belong to

    def idle_forward(self) -> None:
        """A group of one rank has no peers to join."""

    def close(self) -> None:
        self.outputs.close()

    @property
    def slot_states(self) -> SlotStates:
        return TokensOnHost(slots=self.runner.batch.slots)

    # ---- jobs ---------------------------------------------------------------------------------

    def _seat(self, seats: tuple[Seat, ...]) -> None:
        for seat in seats:
            self.runner.device.sampler.seat(seat)

    def _release(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self.runner.device.sampler.release(slot)


def futures_executor(
    *,
    backend: Backend,
    step: ForwardStep,
    pool: BlockPool,
    sampler: Sampler,
    logprobs: Logprobs,
    request_slots: int,
    max_model_len: int,
    num_pages: int,
    groups: tuple[CacheGroupSpec, ...],
    asynchronous: bool = True,
    buckets: tuple[int, ...] = (),
    rank: int = 0,
    output_rank: int = 0,
    log: FuturesLog | None = None,
    buffer: ExecutionBuffer | None = None,
    builder: InputBuilder | None = None,
    host_sync: HostSync = not_watched,
    matchers: GrammarMatchers | None = None,
) -> FuturesExecutor:
    """An executor without requests, whose output thread runs; `close` joins it.

    Args:
        buckets: sizes that decode batches are padded to; () for devices that take any size.
        output_rank: the rank whose outputs are materialised in steady state.
    Raises: SettingsError: asynchronous scheduling with a sampler that samples on the host.
    """
    if asynchronous and getattr(sampler, "samples_on_host", False):
        raise SettingsError(
            "device.async_scheduling: this sampler samples on the host, but a step's tokens "
            "must stay on the device until the next one has taken them; set device.async_scheduling to false "
            "(--no-async-scheduling) or device.executor to streams"
        )
    slots = slot_state(slots=request_slots, max_model_len=max_model_len, num_pages=num_pages, groups=groups)
    batch = input_batch(slots, max_model_len=max_model_len)
    runtime = FuturesRuntime(backend=backend, log=log or NoLog())
    runner = ModelRunner(
        batch=batch,
        builder=builder or HostInputs(batch=batch, buckets=buckets),
        device=DeviceStep(runtime=runtime, step=step, sampler=sampler, logprobs=logprobs),
        buffer=buffer or LastStep(),
        asynchronous=asynchronous,
        host_sync=host_sync,
    )
    return FuturesExecutor(
        runner=runner,
        outputs=open_output_loop(rank=rank, output_rank=output_rank),
        pool=pool,
        filler=Filler(matchers or NoMatchers()),
    )
