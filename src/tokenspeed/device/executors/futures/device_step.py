"""The two jobs of a step: the model's forward, and sampling on the device."""

from __future__ import annotations

import attrs
import torch

from tokenspeed.device.executors.futures.model_input import InputIds, ModelInput
from tokenspeed.device.executors.futures.runtime import DeviceFuture, FuturesRuntime
from tokenspeed.device.executors.landing import LogprobCopies, Outputs
from tokenspeed.device.executors.ports import Logprobs
from tokenspeed.device.executors.prepare import Prepared, PromptRows
from tokenspeed.device.executors.streams import LOGPROB_ROWS
from tokenspeed.device.host_sync import allow_host_sync
from tokenspeed.device.launch_check import Frozen, LaunchCheck, launch_check
from tokenspeed.device.sampling.base import Sampler, TokenMasks
from tokenspeed.device.step import ForwardStep, LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken


@attrs.define(eq=False)
class Logits:
    """Writer: the forward's job. A job's output of a shape that only the model knows."""

    values: torch.Tensor | None = None


@attrs.frozen(kw_only=True, eq=False)
class Executed:
    """``execute_model_state``: a forward that was launched and not yet sampled.

    Attributes:
        forward: resolved with the logits; itself nothing but their end.
        frozen: the inputs; begun by the forward's job, ended by sampling's.
    """

    inputs: ModelInput
    forward: DeviceFuture
    logits: Logits
    frozen: Frozen


@attrs.frozen(kw_only=True, eq=False)
class DeviceStep:
    """Launches jobs; the jobs run on the device's thread."""

    runtime: FuturesRuntime
    step: ForwardStep
    sampler: Sampler
    logprobs: Logprobs
    check: LaunchCheck = attrs.field(factory=launch_check)

    def forward(self, inputs: ModelInput, ready: LayersReady, *, blocking: bool) -> Executed:
        """Launch the model over `inputs`; its `input_ids` may be a future that nobody has seen yet."""
        logits, given = Logits(), inputs.input_ids
        frozen = self.check.freeze(inputs.prepared, None if isinstance(given, DeviceFuture) else given)

        def job() -> torch.Tensor:
            frozen.begin()
            logits.values = self._run(inputs.prepared, inputs.input_ids, ready)
            return torch.empty(0, dtype=torch.int64)  # all it hands on is that it ended

        log = self.runtime.log
        if not isinstance(given, DeviceFuture):
            log.moved("input_ids", blocking=blocking)
        log.moved("metadata", blocking=blocking)
        forward = self.runtime.launch(
            job,
            inputs=(given,) if isinstance(given, DeviceFuture) else (),
            shape=(0,),
            dtype=torch.int64,
            label="forward",
        )
        if blocking:
            with allow_host_sync():
                forward.wait("model output")
        return Executed(inputs=inputs, forward=forward, logits=logits, frozen=frozen)

    def sample(self, executed: Executed, outputs: Outputs, masks: TokenMasks | None = None) -> DeviceFuture:
        """Launch sampling; the future is int64 ``[rows sampled]``, padded with zeros where the batch is."""
        inputs = executed.inputs
        size = inputs.num_tokens if inputs.is_decode else len(inputs.prepared.sampled)

        def job() -> torch.Tensor:
            logits = executed.logits.values
            executed.logits.values = None  # the future outlives the step, the logits need not
            sampled = self._sample(inputs.prepared, logits, outputs, size, masks)
            # Only this step takes the future of the step before as its input.
            executed.frozen.end((inputs.input_ids.unwrap(),) if isinstance(inputs.input_ids, DeviceFuture) else ())
            return sampled

        return self.runtime.launch(
            job, inputs=(executed.forward,), shape=(size,), dtype=torch.int64, label="sample", to_host=True
        )

    # ---- inside jobs --------------------------------------------------------------------------

    def _run(self, prepared: Prepared, input_ids: InputIds, ready: LayersReady) -> torch.Tensor:
        to_device = self.runtime.backend.to_device
        rows = RaggedRows(
            token_ids=input_ids.unwrap() if isinstance(input_ids, DeviceFuture) else to_device(input_ids),
            positions=to_device(prepared.positions),
            offsets=to_device(prepared.offsets),
            contexts=to_device(prepared.contexts),
            block_tables=to_device(prepared.tables),
            more_tables=tuple(to_device(tables) for tables in prepared.more_tables),
            logit_tokens=to_device(prepared.logit_tokens),
        )
        return self.step.run(rows, layers=range(self.step.num_layers), ready=ready)

    def _sample(
        self,
        prepared: Prepared,
        logits: torch.Tensor | None,
        outputs: Outputs,
        size: int,
        masks: TokenMasks | None,
    ) -> torch.Tensor:
        tokens, count, backend = torch.empty(0, dtype=torch.int64), len(prepared.sampled), self.runtime.backend
        if logits is None:
            raise InvariantBroken("sampling of a forward that left no logits")
        if count:
            own, slots, positions = logits[:count], prepared.sampled_slots, prepared.sampled_positions
            if masks is None:
                sampled = self.sampler.sample(own, slots=slots, positions=positions)
            else:
                sampled = self.sampler.sample(own, slots=slots, positions=positions, masks=masks)
            # The row of a NaN may be in the next forward already: its input must be a token of the vocabulary.
            tokens = sampled.tokens.masked_fill(sampled.nan, 0)
            outputs.tokens, outputs.nan = backend.to_host(tokens), backend.to_host(sampled.nan)
            if prepared.logprobs is not None:
                among = backend.to_device(prepared.logprobs.among)
                chosen = own.index_select(0, among), tokens.index_select(0, among)
                outputs.logprobs = self._copies(*chosen, prepared.logprobs.top)
        if prepared.prompt is not None:
            outputs.prompt = self._prompt(prepared.prompt, logits[count:])
        return tokens if size == count else torch.nn.functional.pad(tokens, (0, size - count))

    def _prompt(self, prompt: PromptRows, logits: torch.Tensor) -> tuple[LogprobCopies, ...]:
        targets = self.runtime.backend.to_device(prompt.targets)
        slices = range(0, len(targets), LOGPROB_ROWS)
        return tuple(
            self._copies(logits[at : at + LOGPROB_ROWS], targets[at : at + LOGPROB_ROWS], prompt.top) for at in slices
        )

    def _copies(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> LogprobCopies:
        values, top_ids, top_values = self.logprobs(logits, tokens, top)
        to_host = self.runtime.backend.to_host
        return LogprobCopies(values=to_host(values), top_ids=to_host(top_ids), top_values=to_host(top_values))
