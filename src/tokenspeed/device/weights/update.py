"""Other weights under a running engine, and memory that is given back and taken again.

Weights are brought beside those in force and take their place by one assignment on the exec stream, so
that what fails before leaves the old ones serving. While both are in memory the weights count twice.
The pool, its blocks and the slots stay; nobody may hold a block (`control.control_ops` sees to that).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, assert_never

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_blob

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.device.backends.base import DeviceStream
from tokenspeed.device.give_back import give_back
from tokenspeed.device.host_sync import allow_host_sync
from tokenspeed.device.parts import ModelFactory
from tokenspeed.device.step import ForwardStep
from tokenspeed.device.weights.current import CurrentStep, PoolParts, with_pool
from tokenspeed.device.weights.group import UpdateGroups
from tokenspeed.device.weights.origin import checkpoint_at
from tokenspeed.device.weights.overlay import OverlaidCheckpoint, overlaid
from tokenspeed.errors import InvariantBroken, ModelError, NotSupported, TokenspeedError
from tokenspeed.plane.operations import (
    KV_CACHE,
    WEIGHTS,
    DiskWeights,
    GroupWeights,
    TensorWeights,
    WeightsGroup,
    WeightsSource,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

LEAST_PAGES = 2
"""Of the pool that a step is built with before it gets the one in use."""


class Occupancy(Protocol):
    """The memory that weights and KV take; ``ts-forward`` only. Each method returns "", or why it was not done."""

    def release(self, tags: tuple[str, ...]) -> str: ...

    def resume(self, tags: tuple[str, ...], *, restore: bool) -> str: ...

    def load(self, source: WeightsSource) -> str: ...

    def commit(self, *, accept: bool) -> str: ...

    def open_group(self, group: WeightsGroup) -> str: ...

    def close_group(self, name: str) -> str: ...

    def close(self) -> None: ...


@attrs.frozen(eq=False)
class FixedOccupancy:
    """A device whose weights and memory stay as they were built."""

    reason: str

    def release(self, tags: tuple[str, ...]) -> str:
        del tags
        return self.reason

    def resume(self, tags: tuple[str, ...], *, restore: bool) -> str:
        del tags, restore
        return self.reason

    def load(self, source: WeightsSource) -> str:
        del source
        return self.reason

    def commit(self, *, accept: bool) -> str:
        del accept
        return self.reason

    def open_group(self, group: WeightsGroup) -> str:
        del group
        return self.reason

    def close_group(self, name: str) -> str:
        del name
        return self.reason

    def close(self) -> None:
        return None


@attrs.frozen(kw_only=True, eq=False)
class Staged:
    """Weights that wait for their commit."""

    step: ForwardStep
    checkpoint: Checkpoint


@attrs.define(eq=False)
class OccupancyState:
    """Writer: HostOccupancy. `checkpoint` is where the weights in force came from."""

    checkpoint: Checkpoint
    staged: Staged | None = None


@attrs.frozen(kw_only=True, eq=False)
class HostOccupancy:
    """`Occupancy` in host memory.

    Attributes:
        kv_memory: what keeps KV, its copies in the host tier included; content nobody refers to is given
            back to the machine page by page, addresses stay.
        parts: of the step that was built first, for every later one.
    """

    stream: DeviceStream
    factory: ModelFactory
    page_tokens: int
    current: CurrentStep
    parts: PoolParts
    kv_memory: tuple[torch.Tensor, ...]
    state: OccupancyState
    groups: UpdateGroups = attrs.field(factory=UpdateGroups)

    def release(self, tags: tuple[str, ...]) -> str:
        def job() -> None:
            if WEIGHTS in tags:
                self.current.state.step = None
            if KV_CACHE in tags:
                for memory in self.kv_memory:
                    give_back(memory)

        return self._tried("release", job)

    def resume(self, tags: tuple[str, ...], *, restore: bool) -> str:
        """KV pages come back by themselves, empty, where they are first written."""

        def job() -> None:
            if WEIGHTS in tags and restore:
                self.current.state.step = self._built(self.state.checkpoint)

        return self._tried("resume", job)

    def load(self, source: WeightsSource) -> str:
        self.state.staged = None

        def job() -> None:
            checkpoint = self._checkpoint(source)
            self.state.staged = Staged(step=self._built(checkpoint), checkpoint=checkpoint)

        return self._tried("weights", job)

    def commit(self, *, accept: bool) -> str:
        def job() -> None:
            staged, self.state.staged = self.state.staged, None
            if accept and staged is None:
                raise InvariantBroken("a commit of weights that were not loaded")
            if accept and staged is not None:
                self.current.state.step, self.state.checkpoint = staged.step, staged.checkpoint

        return self._tried("commit", job)

    def open_group(self, group: WeightsGroup) -> str:
        return self._tried("group", lambda: self.groups.open(group))

    def close_group(self, name: str) -> str:
        return self._tried("group", lambda: self.groups.close(name))

    def close(self) -> None:
        self.groups.close_all()

    # ---- inside jobs of the exec stream -------------------------------------------------------

    def _checkpoint(self, source: WeightsSource) -> Checkpoint:
        match source:
            case DiskWeights(path=path):
                return checkpoint_at(path, _files(self.state.checkpoint))
            case TensorWeights(blobs=blobs):
                return self._over(_tensors(blobs))
            case GroupWeights():
                return self._over(self.groups.receive(source))
            case other:
                assert_never(other)

    def _over(self, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
        base = self.state.checkpoint
        if _files(base).kind is CheckpointKind.GGUF:
            raise ModelError(
                "tensors: the engine keeps the quantized blocks of a .gguf file, which single tensors cannot"
                " replace; serve a safetensors folder, or update from disk"
            )
        if isinstance(base, OverlaidCheckpoint):
            return overlaid(base.base, {**base.tensors, **tensors})
        return overlaid(base, tensors)

    def _built(self, checkpoint: Checkpoint) -> ForwardStep:
        with torch.inference_mode():
            weights = self.factory.load(checkpoint, NoProgress())
            bound = self.factory.bind(weights, num_pages=LEAST_PAGES, page_tokens=self.page_tokens)
            return with_pool(bound.step, bound.pool, self.parts)

    def _tried(self, label: str, job: Callable[[], None]) -> str:
        """Run `job` on the exec stream, where an error of the caller's must not end the stream.

        No work of a round, so that it may wait for the device: files of weights are read here.
        """
        refusals: list[str] = []

        def guarded() -> None:
            try:
                with allow_host_sync():
                    job()
            except InvariantBroken:
                raise
            except (TokenspeedError, NotSupported, OSError, MemoryError) as fault:
                refusals.append(str(fault) or type(fault).__name__)

        self.stream.submit(guarded, label).wait()
        if refusals:
            log.warning("%s: %s", label, refusals[0])
        return refusals[0] if refusals else ""


def _files(checkpoint: Checkpoint) -> Checkpoint:
    """The files, without what replaced some of their tensors."""
    return checkpoint.base if isinstance(checkpoint, OverlaidCheckpoint) else checkpoint


def _tensors(blobs: tuple[bytes, ...]) -> dict[str, torch.Tensor]:
    """Raises: ModelError: a blob is no safetensors file."""
    found: dict[str, torch.Tensor] = {}
    for at, blob in enumerate(blobs):
        try:
            found.update(load_blob(blob))
        except (SafetensorError, ValueError, KeyError) as fault:
            raise ModelError(f"tensors[{at}]: not the bytes of a safetensors file: {fault}") from fault
    if not found:
        raise ModelError("tensors: none were given")
    return found
