"""The executor for runtimes with streams: the next step's inputs stay in a buffer ordered by the stream.

The forward thread makes numpy metadata and queues jobs; the exec stream runs them in that order. So
block tables and owners, kept on the host, change in queue order and reach each forward as copies,
while sampler state and the latest token of each slot live behind the stream and are touched by its
jobs alone.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

import attrs
import torch

from tokenspeed.device.backends.base import Backend, DeviceBuffer, DeviceEvent, Job
from tokenspeed.device.executors.landing import LogprobCopies, NoForwardLanding, Outputs, StreamLanding
from tokenspeed.device.executors.ports import BlockPool, Logprobs, SlotStates
from tokenspeed.device.executors.prepare import Prepared, PromptRows, prepare
from tokenspeed.device.executors.slot_states import TokensOnDevice
from tokenspeed.device.executors.slots import SlotState, slot_state
from tokenspeed.device.grammar_fill import Filler
from tokenspeed.device.host_sync import device_code
from tokenspeed.device.launch_check import LaunchCheck, launch_check
from tokenspeed.device.sampling.base import SampledTokens, Sampler, TokenMasks
from tokenspeed.device.step import ForwardStep, LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.grammar import GrammarMatchers, GrammarPlan, NoMatchers
from tokenspeed.plane.plan import BlockCopy, BlockGrants, Dispatch, ForwardBatch, GroupBlocks, Seat
from tokenspeed.plane.ports import Landing
from tokenspeed.plane.specs import CacheGroupSpec

LOGPROB_ROWS = 64
"""Prompt rows whose log-softmax is computed at once: bounds a copy of ``[rows, vocab]`` float32."""


@attrs.frozen(kw_only=True, eq=False)
class StreamExecutor:
    """`device.handle.Executor` over a backend's exec stream. Build it with `stream_executor`.

    Attributes:
        future_tokens: int64 ``[slots]``, the latest token sampled for each slot; written and read by
            jobs only. A slot's token is read by the row's next forward or never, because the next
            sampled token of that slot comes from that forward or from behind a new seat.
    """

    backend: Backend
    step: ForwardStep
    pool: BlockPool
    sampler: Sampler
    logprobs: Logprobs
    slots: SlotState
    future_tokens: DeviceBuffer
    filler: Filler = attrs.field(factory=lambda: Filler(NoMatchers()))
    check: LaunchCheck = attrs.field(factory=launch_check)

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """On the exec stream, behind every forward queued before, which may still write a source."""
        if copies:
            self._submit(partial(self.pool.copy_blocks, copies), "copy")

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        if blocks:
            self._submit(partial(self.pool.zero_blocks, blocks), "zero")

    def forward(
        self, batch: ForwardBatch | None, grants: tuple[BlockGrants, ...], dispatch: Dispatch, ready: LayersReady
    ) -> Landing:
        """Queue seats, then the batch; its inputs are copies made here, its outputs land with the event.

        Raises: InvariantBroken: plan and slots contradict each other, or the dispatch carries inputs
            of a feature this build does not have.
        """
        if dispatch.histories or dispatch.ngram_windows:
            raise InvariantBroken("a dispatch for a feature that was not built", dispatch=dispatch)
        for seat in dispatch.seats:
            self.slots.seat(seat)
        for changes in grants:
            self.slots.grant(changes)
        if dispatch.seats:
            self._submit(self.check.seats(dispatch.seats, partial(self._seat, dispatch.seats)), "seat")
        if batch is None:
            return NoForwardLanding(event=self.backend.exec_stream.submit(self._all_layers(ready), "fence"))
        prepared = prepare(batch, dispatch.logprobs, self.slots)
        outputs, grammars = Outputs(), dispatch.grammars
        masks = self.filler.fill(grammars, prepared.sampled) if grammars.eager else None
        job = self.check.forward(batch, prepared, partial(self._run, prepared, ready, outputs, grammars, masks))
        event = self._submit(job, "batch")
        return StreamLanding(event=event, prepared=prepared, outputs=outputs)

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Forget what the sampler holds for ended requests, behind the forwards that read it (OL-14)."""
        ended = tuple(slot for row, slot in zip(rows, slots, strict=True) if self.slots.vacate(row, slot))
        if ended:
            job = self.check.release(ended, self.future_tokens, partial(self._release, ended))
            self._submit(job, "release")

    def idle_forward(self) -> None:
        """A group of one rank has no peers to join."""

    def close(self) -> None:
        """It has no thread of its own."""

    @property
    def slot_states(self) -> SlotStates:
        return TokensOnDevice(slots=self.slots, tokens=self.future_tokens)

    def _all_layers(self, ready: LayersReady) -> Job:
        """Stands for all jobs before it, and for the plan's load, which no later plan's forward waits for."""
        return partial(ready.wait_for, self.step.num_layers - 1)

    def _submit(self, job: Job, label: str) -> DeviceEvent:
        def without_gradients() -> None:
            with torch.inference_mode():
                job()

        return self.backend.exec_stream.submit(without_gradients, label)

    # ---- jobs of the exec stream --------------------------------------------------------------

    def _seat(self, seats: tuple[Seat, ...]) -> None:
        for seat in seats:
            self.sampler.seat(seat)

    def _release(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self.sampler.release(slot)

    def _run(
        self,
        prepared: Prepared,
        ready: LayersReady,
        outputs: Outputs,
        grammars: GrammarPlan,
        masks: TokenMasks | None,
    ) -> None:
        """One forward: resolve inputs, all layers, sample, copy out."""
        to_device = self.backend.to_device
        future = self.future_tokens.unwrap(chain(prepared.late_slots, prepared.sampled_slots))
        token_ids = to_device(prepared.token_ids)
        if len(prepared.late):
            tokens = future.index_select(0, to_device(prepared.late_slots))
            token_ids = token_ids.index_copy(0, to_device(prepared.late), tokens)
        rows = RaggedRows(
            token_ids=token_ids,
            positions=to_device(prepared.positions),
            offsets=to_device(prepared.offsets),
            contexts=to_device(prepared.contexts),
            block_tables=to_device(prepared.tables),
            more_tables=tuple(to_device(tables) for tables in prepared.more_tables),
            logit_tokens=to_device(prepared.logit_tokens),
        )
        logits = self.step.run(rows, layers=range(self.step.num_layers), ready=ready)
        count = len(prepared.sampled)
        if count:
            if grammars.rows and not grammars.eager:
                masks = self.filler.fill(grammars, prepared.sampled)
            sampled = self._sample(prepared, logits[:count], future, outputs, masks)
            if masks is not None and not grammars.eager:
                self._advance(grammars, masks, sampled, outputs)
        if prepared.prompt is not None:
            outputs.prompt = self._prompt(prepared.prompt, logits[count:])

    def _sample(
        self,
        prepared: Prepared,
        logits: torch.Tensor,
        future: torch.Tensor,
        outputs: Outputs,
        masks: TokenMasks | None,
    ) -> SampledTokens:
        backend, slots, positions = self.backend, prepared.sampled_slots, prepared.sampled_positions
        if masks is None:
            sampled = self.sampler.sample(logits, slots=slots, positions=positions)
        else:
            sampled = self.sampler.sample(logits, slots=slots, positions=positions, masks=masks)
        # The row of a NaN may be in the next forward already: its input must be a token of the vocabulary.
        tokens = sampled.tokens.masked_fill(sampled.nan, 0)
        future.index_copy_(0, backend.to_device(prepared.sampled_slots), tokens)
        outputs.tokens, outputs.nan = backend.to_host(tokens), backend.to_host(sampled.nan)
        if prepared.logprobs is not None:
            among = backend.to_device(prepared.logprobs.among)
            chosen = logits.index_select(0, among), tokens.index_select(0, among)
            outputs.logprobs = self._copies(*chosen, prepared.logprobs.top)
        return sampled

    @device_code
    def _advance(self, plan: GrammarPlan, masks: TokenMasks, sampled: SampledTokens, outputs: Outputs) -> None:
        """The host node's second half, where tokens are in host memory (GR-7)."""
        outputs.grammars = self.filler.accept(plan, masks, sampled.tokens, sampled.nan)

    def _prompt(self, prompt: PromptRows, logits: torch.Tensor) -> tuple[LogprobCopies, ...]:
        targets = self.backend.to_device(prompt.targets)
        slices = range(0, len(targets), LOGPROB_ROWS)
        return tuple(
            self._copies(logits[at : at + LOGPROB_ROWS], targets[at : at + LOGPROB_ROWS], prompt.top) for at in slices
        )

    def _copies(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> LogprobCopies:
        values, top_ids, top_values = self.logprobs(logits, tokens, top)
        to_host = self.backend.to_host
        return LogprobCopies(values=to_host(values), top_ids=to_host(top_ids), top_values=to_host(top_values))


def stream_executor(
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
    matchers: GrammarMatchers | None = None,
) -> StreamExecutor:
    """An executor with empty slots. Call it inside a job of the exec stream: it allocates there."""
    return StreamExecutor(
        backend=backend,
        step=step,
        pool=pool,
        sampler=sampler,
        logprobs=logprobs,
        slots=slot_state(slots=request_slots, max_model_len=max_model_len, num_pages=num_pages, groups=groups),
        future_tokens=backend.allocate((request_slots,), torch.int64),
        filler=Filler(matchers or NoMatchers()),
    )
