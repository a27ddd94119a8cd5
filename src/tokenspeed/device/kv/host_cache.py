"""The host tier on the device side: host-tier blocks (L2) and retraction images, copied by two streams.

Order of one plan's copies (the numbers are those of `device.handle.StreamDeviceHandle.execute`):

1. Stores, on the write stream. Those that must read what the plan overwrites (all images; write-backs
   of evicted blocks) come first, next to each other; the end of the last one holds up the exec stream.
   Write-through stores follow and hold up nobody: their sources stay pinned.
4. Loads, on the load stream. Load-backs come layer by layer, and the plan's forward reads a layer
   when it is there. Restores follow; no forward waits for them, because a request takes part in none
   until its restore is acknowledged.

`kv.host_fences` names the waits and says what each protects. A plan's forward waits for the load of
its own plan or for none (RA-38): a plan with load-backs and no batch ends on the exec stream with its
load, so that a later plan's forward, which may read those blocks, is behind them, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Protocol

import attrs
import torch

from tokenspeed.device.backends.base import Backend, DeviceEvent, DeviceStream
from tokenspeed.device.executors.ports import BlockBytes, HostBytes, SlotStates
from tokenspeed.device.kv.block_mover import BlockMover, MemoryMover
from tokenspeed.device.kv.host_acks import OpenCopies
from tokenspeed.device.kv.host_buffers import HostBuffers
from tokenspeed.device.kv.host_checks import OpChecks
from tokenspeed.device.kv.host_fences import Fence, Fences
from tokenspeed.device.layer_counter import EVERY_LAYER, LayersArrived
from tokenspeed.device.step import AllReady, LayersReady
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import LoadBackOp, RestoreOp, SnapshotOp, WriteBackOp
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import CacheAcks

SHUTDOWN_S = 30.0


class LoadWait(enum.Enum):
    """How a forward waits for its plan's load-backs: for each layer, or for all of them before it begins."""

    LAYERS = "layers"
    WHOLE = "whole"


@attrs.frozen
class LayerPlace:
    """Where layer `layer` of the model is: its cache group, and its number among the group's layers."""

    layer: int
    group: int
    index: int


class CopyCost(Protocol):
    """Is told of every copy, inside its job; charges the time where copies take none by themselves."""

    def copied(self, group: int, blocks: int, share: float) -> None:
        """`share` of `blocks` blocks: 1, or that of one layer."""
        ...


class NoCost:
    """Copies take the time they take."""

    def copied(self, group: int, blocks: int, share: float) -> None:
        return None


@attrs.frozen(eq=False)
class LoadEnd:
    """`Wakeup` of a load's last job: of a load that failed or never ran, nothing more will arrive."""

    event: DeviceEvent
    arrived: LayersArrived

    def set(self) -> None:
        try:
            self.event.wait()
        except BaseException as error:
            self.arrived.fail(error)  # told to the forward, which raises it

    def wait(self, timeout_s: float | None) -> bool:
        return self.event.query()


@attrs.frozen(kw_only=True, eq=False)
class HostCacheExecutor:
    """`device.handle.HostTier`. Build it with `kv.host_build.host_cache`.

    Attributes:
        placement: where each layer of the model is, in the order in which a forward reads them; for
            `LoadWait.WHOLE` the layers of the pool, in any order.
        counters: makes the counter that a load raises.
    """

    backend: Backend
    blocks: BlockBytes
    slots: SlotStates
    buffers: HostBuffers
    placement: tuple[LayerPlace, ...]
    counters: Callable[[], LayersArrived]
    load_wait: LoadWait
    fences: Fences
    cost: CopyCost
    checks: OpChecks
    mover: BlockMover = attrs.field(factory=MemoryMover)
    open: OpenCopies = attrs.field(factory=OpenCopies)
    shutdown_s: float = SHUTDOWN_S

    def store(self, ops: tuple[WriteBackOp | SnapshotOp, ...]) -> None:
        if not ops:
            return
        self._admit(ops)
        write, execute = self.backend.write_stream, self.backend.exec_stream
        self.fences.wait(Fence.STORE_AFTER_PLANS, write, self._so_far(execute))
        ordered = tuple(op for op in ops if isinstance(op, SnapshotOp) or op.stream_ordered)
        events = [self._store(write, op) for op in ordered]
        if events:
            self.fences.wait(Fence.PLAN_AFTER_STORES, execute, events[-1])
        for op in ops:
            if isinstance(op, WriteBackOp) and not op.stream_ordered:
                self._store(write, op)

    def load(self, ops: tuple[LoadBackOp | RestoreOp, ...]) -> LayersReady:
        if not ops:
            return AllReady()
        self._admit(ops)
        load = self.backend.load_stream
        self.fences.wait(Fence.LOAD_AFTER_PLAN, load, self._so_far(self.backend.exec_stream))
        backs = tuple(op for op in ops if isinstance(op, LoadBackOp))
        ready = self._load_backs(backs) if backs else AllReady()
        for op in ops:
            if isinstance(op, RestoreOp):
                self.slots.expect(op.slot)
                self.open.add(op, load.submit(partial(self._restore, op), "restore"))
        return ready

    def notify(self, wakeup: Wakeup) -> None:
        self.open.notify(wakeup)

    def acks(self) -> CacheAcks:
        return self.open.take()

    def flush(self) -> None:
        """What the blocks hold is nobody's any more; only the scheduler's index, cleared before, named it.

        Raises: InvariantBroken: an operation is not acknowledged; a cache is cleared at rest only.
        """
        if len(self.open):
            raise InvariantBroken("the host tier was cleared under a copy", open=len(self.open))

    def regions(self) -> tuple[HostBytes, ...]:
        return self.buffers.blocks

    def memory(self) -> tuple[HostBytes, ...]:
        return tuple(memory for memory in (self.buffers.l2, self.buffers.images) if memory.size)

    def shutdown(self) -> None:
        """Raises: DeviceLost: a copy does not end within `shutdown_s`."""
        self.open.close(self.shutdown_s)

    # ---- on ts-forward ------------------------------------------------------------------------

    def _admit(self, ops: tuple[WriteBackOp | SnapshotOp | LoadBackOp | RestoreOp, ...]) -> None:
        self.open.check_open()
        for op in ops:
            self.checks.check(op)

    def _so_far(self, stream: DeviceStream) -> DeviceEvent:
        """All that was submitted to `stream`, its waits included."""
        return stream.submit(_nothing, "fence")

    def _store(self, write: DeviceStream, op: WriteBackOp | SnapshotOp) -> DeviceEvent:
        if isinstance(op, WriteBackOp):
            event = write.submit(partial(self._write_back, op), "write-back")
        else:
            event = write.submit(partial(self._snapshot, op), "snapshot")
        self.open.add(op, event)
        return event

    def _load_backs(self, ops: tuple[LoadBackOp, ...]) -> LayersReady:
        """One job for each layer of a group that is loaded; the end of the last is the end of every operation."""
        load, arrived = self.backend.load_stream, self.counters()
        groups = {op.group for op in ops}
        loaded = [place for place in self.placement if place.group in groups]
        arrived.raise_to(loaded[0].layer)  # layers of other groups wait for nothing
        for place, following in zip(loaded, [*(place.layer for place in loaded[1:]), EVERY_LAYER], strict=True):
            event = load.submit(partial(self._load_layer, ops, place, arrived, following), f"load layer {place.layer}")
        event.notify(LoadEnd(event, arrived))
        for op in ops:
            self.open.add(op, event)
        if self.load_wait is LoadWait.WHOLE:
            self.fences.wait(Fence.FORWARD_AFTER_LOAD, self.backend.exec_stream, event)
            return AllReady()
        return self.fences.layers(Fence.FORWARD_AFTER_LAYER, arrived)

    # ---- jobs of the write stream -------------------------------------------------------------

    def _write_back(self, op: WriteBackOp) -> None:
        self.mover.to_host(self.buffers.blocks[op.group], op.host_blocks, self._device(op.group), op.device_blocks)
        self.cost.copied(op.group, len(op.device_blocks), 1.0)

    def _snapshot(self, op: SnapshotOp) -> None:
        for tail in op.tail:
            places = tuple(range(len(tail.blocks)))
            self.mover.to_host(self.buffers.tails[tail.group][op.image], places, self._device(tail.group), tail.blocks)
            self.cost.copied(tail.group, len(tail.blocks), 1.0)
        self.slots.export(op.slot, self.buffers.states[op.image])

    # ---- jobs of the load stream --------------------------------------------------------------

    def _load_layer(
        self, ops: tuple[LoadBackOp, ...], place: LayerPlace, arrived: LayersArrived, following: int
    ) -> None:
        group, index = place.group, place.index
        device, host = self._device(group)[:, index], self.buffers.blocks[group][:, index]
        for op in ops:
            if op.group == group:
                self.mover.to_device(device, op.device_blocks, host, op.host_blocks)
                self.cost.copied(group, len(op.device_blocks), 1 / self.buffers.layout.groups[group].layers)
        arrived.raise_to(following)

    def _restore(self, op: RestoreOp) -> None:
        for pages in op.pages:
            host = self.buffers.blocks[pages.group]
            self.mover.to_device(self._device(pages.group), pages.device_blocks, host, pages.host_blocks)
            self.cost.copied(pages.group, len(pages.device_blocks), 1.0)
        for tail in op.tail:
            places = tuple(range(len(tail.blocks)))
            self.mover.to_device(
                self._device(tail.group), tail.blocks, self.buffers.tails[tail.group][op.image], places
            )
            self.cost.copied(tail.group, len(tail.blocks), 1.0)
        self.slots.restore(op.slot, self.buffers.states[op.image])

    def _device(self, group: int) -> torch.Tensor:
        """The device's blocks: uint8 ``[blocks, layers, layer_bytes]``."""
        with torch.inference_mode():
            return self.blocks.layer_bytes(group)


def _nothing() -> None:
    """The job whose event stands for all jobs before it."""
