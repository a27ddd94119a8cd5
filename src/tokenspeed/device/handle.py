"""The device side at serving time: one method for each operation the control plane may ask for.

`StreamDeviceHandle.execute` fixes the order in which one plan's work reaches the device. The order
is a correctness rule, because a plan may reuse a block for several purposes (RA-25).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

import attrs

from tokenspeed.device.backends.base import Backend
from tokenspeed.device.executors.ports import HostBytes, SlotStates
from tokenspeed.device.gc_hooks import RoundCounter
from tokenspeed.device.profile import Profiler
from tokenspeed.device.step import AllReady, LayersReady
from tokenspeed.device.weights.update import FixedOccupancy, Occupancy
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.operations import WeightsGroup, WeightsSource
from tokenspeed.plane.plan import (
    BlockCopy,
    BlockGrants,
    DeviceCacheOp,
    Dispatch,
    ExecutionPlan,
    ForwardBatch,
    GroupBlocks,
    LoadBackOp,
    RemoteStream,
    RestoreOp,
    SnapshotOp,
    StorageOp,
    WriteBackOp,
)
from tokenspeed.plane.ports import Landing, Wakeup
from tokenspeed.plane.results import NO_ACKS, CacheAcks, ForwardResult


@attrs.frozen(kw_only=True)
class CacheOps:
    """A plan's cache operations, adapted once: what the device does, and what storage workers do."""

    device: tuple[DeviceCacheOp, ...]
    storage: tuple[StorageOp, ...]


def cache_ops_from_plan(plan: ExecutionPlan) -> CacheOps:
    """The one adaptation of a plan's cache operations; both tuples keep the plan's order."""
    return CacheOps(device=plan.device_ops(), storage=plan.storage_ops())


class HostTier(Protocol):
    """Copies between device blocks and the host tier. Called from ``ts-forward`` but for `acks`."""

    def store(self, ops: tuple[WriteBackOp | SnapshotOp, ...]) -> None:
        """Queue copies to the host on the write stream."""
        ...

    def load(self, ops: tuple[LoadBackOp | RestoreOp, ...]) -> LayersReady:
        """Queue copies to the device on the load stream; what this plan's forward waits on."""
        ...

    def notify(self, wakeup: Wakeup) -> None:
        """Have `wakeup` set when a copy queued since the last call ends; at once if it has (RA-7)."""
        ...

    def acks(self) -> CacheAcks:
        """Thread-safe; looks at events only. Raises what a copy raised."""
        ...

    def flush(self) -> None:
        """The scheduler forgot all blocks of the host tier."""
        ...

    def regions(self) -> tuple[HostBytes, ...]:
        """Its blocks by cache group, uint8 ``[blocks, layers, layer_bytes]``; () where there are none."""
        ...

    def memory(self) -> tuple[HostBytes, ...]:
        """What it keeps blocks and images in; its content is nobody's while the scheduler knows of none."""
        ...

    def shutdown(self) -> None:
        """Wait, not for ever, for the copies that are queued; no other is taken afterwards."""
        ...


@attrs.frozen(eq=False)
class NoHostTier:
    """This build keeps no host tier, and its scheduler plans no operation of one."""

    def store(self, ops: tuple[WriteBackOp | SnapshotOp, ...]) -> None:
        if ops:
            raise InvariantBroken("a host-bound store without a host tier", ops=ops)

    def load(self, ops: tuple[LoadBackOp | RestoreOp, ...]) -> LayersReady:
        if ops:
            raise InvariantBroken("a device-bound load without a host tier", ops=ops)
        return AllReady()

    def notify(self, wakeup: Wakeup) -> None:
        return None

    def acks(self) -> CacheAcks:
        return NO_ACKS

    def flush(self) -> None:
        return None

    def regions(self) -> tuple[HostBytes, ...]:
        return ()

    def memory(self) -> tuple[HostBytes, ...]:
        return ()

    def shutdown(self) -> None:
        return None


class RemotePeer(Protocol):
    """Takes the remote streams of each plan to the transfer peer (DP-42)."""

    def submit(self, prefill: tuple[RemoteStream, ...], decode: tuple[RemoteStream, ...]) -> None: ...


@attrs.frozen(eq=False)
class NoRemotePeer:
    """No other node takes part; the scheduler plans no remote stream."""

    def submit(self, prefill: tuple[RemoteStream, ...], decode: tuple[RemoteStream, ...]) -> None:
        if prefill or decode:
            raise InvariantBroken("a remote stream without a transfer peer", prefill=prefill, decode=decode)


class Executor(Protocol):
    """Puts model work on a device; ``ts-forward`` only. Nothing here waits for the device."""

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """Queue ``destination = source`` for each, as if all sources were read first (RA-31)."""
        ...

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None: ...

    def forward(
        self, batch: ForwardBatch | None, grants: tuple[BlockGrants, ...], dispatch: Dispatch, ready: LayersReady
    ) -> Landing:
        """Take over grants and seats, then queue the batch if there is one."""
        ...

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None: ...

    def idle_forward(self) -> None: ...

    @property
    def slot_states(self) -> SlotStates:
        """What a retraction image keeps of a slot."""
        ...

    def close(self) -> None:
        """Join the executor's own threads; the device is closed already, so that nothing is pending."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class PlanLanding:
    """The landing of a plan with cache operations: their ends wake the control thread, too."""

    landing: Landing
    host_tier: HostTier

    def landed(self) -> bool:
        return self.landing.landed()

    def result(self) -> ForwardResult:
        return self.landing.result()

    def notify(self, wakeup: Wakeup) -> None:
        self.landing.notify(wakeup)
        self.host_tier.notify(wakeup)


@attrs.frozen(kw_only=True, eq=False)
class StreamDeviceHandle:
    """`plane.ports.DeviceHandle` over an executor; called from ``ts-forward`` only."""

    backend: Backend
    executor: Executor
    profiler: Profiler
    rounds: RoundCounter
    host_tier: HostTier = attrs.field(factory=NoHostTier)
    peer: RemotePeer = attrs.field(factory=NoRemotePeer)
    occupancy: Occupancy = attrs.field(default=FixedOccupancy("this device keeps its weights and its memory"))

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch, cache_ops: tuple[DeviceCacheOp, ...]) -> Landing:
        """Submit one plan. `cache_ops` is the device part of `cache_ops_from_plan` (DP-53)."""
        with self.profiler.batch(plan):
            return self._submit(plan, dispatch, cache_ops)

    def _submit(self, plan: ExecutionPlan, dispatch: Dispatch, cache_ops: tuple[DeviceCacheOp, ...]) -> Landing:
        stores = tuple(op for op in cache_ops if isinstance(op, WriteBackOp | SnapshotOp))
        loads = tuple(op for op in cache_ops if isinstance(op, LoadBackOp | RestoreOp))
        if len(stores) + len(loads) != len(cache_ops):
            raise InvariantBroken("an unknown operation among the device's", ops=cache_ops)
        # A store reads what a copy overwrites; a copy reads what zeroing wipes; a load and the batch
        # want their blocks clean; a remote prefill waits for the zeroing; the batch reads it all.
        self.host_tier.store(stores)
        self.executor.copy_blocks(plan.pages_to_copy)
        self.executor.zero_blocks(plan.pages_to_zero)
        ready = self.host_tier.load(loads)
        self.peer.submit(plan.remote_prefill, plan.remote_decode)
        landing = self.executor.forward(plan.batch, plan.grants, dispatch, ready)
        return PlanLanding(landing=landing, host_tier=self.host_tier) if cache_ops else landing

    def poll_cache_results(self) -> CacheAcks:
        return self.host_tier.acks()

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self.executor.release(rows, slots)

    def note_forwarded(self) -> None:
        self.rounds.note_forwarded()

    def idle_forward(self) -> None:
        self.executor.idle_forward()

    def flush_cache(self) -> None:
        """Blocks on the device need no flush: nothing but the scheduler's index, cleared before, named them."""
        self.host_tier.flush()

    def release_memory(self, tags: tuple[str, ...]) -> str:
        return self.occupancy.release(tags)

    def resume_memory(self, tags: tuple[str, ...], restore: bool) -> str:
        return self.occupancy.resume(tags, restore=restore)

    def load_weights(self, source: WeightsSource) -> str:
        return self.occupancy.load(source)

    def commit_weights(self, accept: bool) -> str:
        return self.occupancy.commit(accept=accept)

    def open_weights_group(self, group: WeightsGroup) -> str:
        return self.occupancy.open_group(group)

    def close_weights_group(self, name: str) -> str:
        return self.occupancy.close_group(name)

    def start_profile(self, path: str) -> str:
        return self.profiler.start(path)

    def stop_profile(self) -> str:
        return self.profiler.stop()

    def shutdown_cache(self) -> None:
        self.host_tier.shutdown()

    def close(self) -> None:
        """Write a recording that still runs, run what is queued, and join the streams.

        The pools go with the last reference to this handle.
        """
        with ExitStack() as closing:
            closing.callback(self.executor.close)
            closing.callback(self.backend.close)
            closing.callback(self.occupancy.close)
            self.profiler.stop()
