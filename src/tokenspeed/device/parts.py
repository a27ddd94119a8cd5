"""The replaceable parts of the device side; `build_device_side(settings, checkpoint, DeviceParts(...))`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import attrs

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.backends.base import Backend
from tokenspeed.device.backends.host_stream import JobWatch
from tokenspeed.device.executors.ports import BlockPool, Logprobs
from tokenspeed.device.gc_hooks import AutomaticCollection, RoundCounter
from tokenspeed.device.kv.block_mover import TierParts
from tokenspeed.device.kv.host_cache import CopyCost
from tokenspeed.device.kv.layout import CacheGroup
from tokenspeed.device.machine import Machine
from tokenspeed.device.sampling.base import Sampler
from tokenspeed.device.step import ForwardStep
from tokenspeed.plane.grammar import GrammarMatchers
from tokenspeed.plane.specs import CacheGroupSpec


class LoadedWeights(Protocol):
    """Weights in memory, not yet bound to a pool."""

    @property
    def nbytes(self) -> int: ...


class BoundModel(Protocol):
    """A model that can run: its step writes into its pool."""

    @property
    def step(self) -> ForwardStep: ...

    @property
    def pool(self) -> BlockPool: ...


class ModelFactory(Protocol):
    """Makes the model in two steps, because the pool's size depends on the weights'. Exec stream only."""

    def expected_bytes(self, config: ModelConfig) -> int:
        """About what the weights will take; 0 where that is not known. May be called from any thread."""
        ...

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        """What the model keeps of its tokens, by cache group. May be called from any thread.

        `page_tokens`: of the finest group's block; other groups' blocks have multiples of it.
        """
        ...

    def load(self, checkpoint: Checkpoint, progress: Progress) -> LoadedWeights:
        """Raises ModelError: the checkpoint's tensors are not those of its configuration."""
        ...

    def bind(self, weights: LoadedWeights, *, num_pages: int, page_tokens: int) -> BoundModel:
        """Allocate the pool; `weights` is what `load` returned and belongs to the result.

        `num_pages`: parents, the null parent included, of the layout that `cache_groups` give.
        """
        ...


class SamplerFactory(Protocol):
    """Makes the sampler. Exec stream only."""

    def __call__(self, *, slots: int, vocab_size: int) -> Sampler:
        """`vocab_size`: ids from there on must never be drawn, though the logits may be wider."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class DeviceParts:
    """What to use in place of the build's own choice; None: the build's own.

    Attributes:
        backend: opens the device with a number of compute threads.
        logprobs: reads the log-probabilities from the model's logits.
        rounds: is told of forwarded rounds; a rank process of the launcher passes `GcHooks`.
        machine: limits to size by; None: those of this process.
        watch: what jobs of the exec stream run inside of, with the backends of `build.OPENERS`.
        tier: of a host tier, where the device's memory is not the host's.
        copy_cost: for these cache groups, what host-tier copies cost beside the time they take.
        matchers: of constrained requests, by handle.
    """

    backend: Callable[[int], Backend] | None = None
    model: ModelFactory | None = None
    sampler: SamplerFactory | None = None
    logprobs: Logprobs | None = None
    rounds: RoundCounter = attrs.field(factory=AutomaticCollection)
    machine: Machine | None = None
    watch: JobWatch = nullcontext
    tier: TierParts | None = None
    copy_cost: Callable[[tuple[CacheGroupSpec, ...]], CopyCost] | None = None
    matchers: GrammarMatchers | None = None
