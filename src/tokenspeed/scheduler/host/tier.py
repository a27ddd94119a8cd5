"""The host tier as the rest of the scheduler sees it: what is stored when, and what can be loaded.

Write-through stores blocks as they become findable on the device: ordinary stores, whose sources stay
pinned until the acknowledgment (RA-30). Write-back stores what a plan evicts: stream-ordered stores,
which read the old bytes before anything of the plan overwrites them (RA-27). A block that is evicted
while its write-through still waits for its turn is stored that way too.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.plan import CacheOp, int32
from tokenspeed.plane.results import CacheAcks
from tokenspeed.scheduler.config import WritePolicy
from tokenspeed.scheduler.host.blocks import HostBlocks
from tokenspeed.scheduler.host.operations import Load, Operations, Store, Work
from tokenspeed.scheduler.pool import Pool

STORED_PER_PLAN = 256
"""Blocks that one plan writes through at most; the rest waits for later plans."""


@attrs.define(eq=False)
class TierState:
    """Writer: HostTier.

    Attributes:
        waiting: by group, device blocks to be written through, with their names, in order of
            publication. Bounded by the device's blocks.
        evicted: by group, names of blocks that the plan under construction evicts.
        loading: by group and device block: an open load writes it.
        finished: works that were acknowledged, for `take_finished`.
    """

    waiting: tuple[dict[int, bytes], ...]
    evicted: tuple[dict[bytes, int], ...]
    loading: tuple[BoolArray, ...]


@attrs.frozen(kw_only=True, eq=False)
class HostTier:
    """Meets `tier.Tier`. `pool` is the device's."""

    policy: WritePolicy
    pool: Pool
    host: HostBlocks
    operations: Operations
    state: TierState

    @property
    def open(self) -> int:
        return self.operations.open

    def find(self, group: int, name: bytes) -> int | None:
        return self.host.find(group, name)

    def evicting(self, group: int, block: int, name: bytes) -> None:
        # Host blocks are taken when the plan is complete: what it loads is pinned by then.
        waited = self.state.waiting[group].pop(block, None)
        if waited is not None or self.policy is WritePolicy.WRITE_BACK:
            self.state.evicted[group][name] = block

    def forgotten(self, group: int, block: int) -> None:
        """The device block is not findable any more, and its owner may write over it at once."""
        self.state.waiting[group].pop(block, None)
        if not self.pool.references(group, block):
            return
        for work in self.operations.works():
            if isinstance(work, Store) and not work.ordered and work.group == group and block in work.device_blocks:
                self.host.void(group, int(work.host_blocks[(work.device_blocks == block).argmax()]))

    def published(self, group: int, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        if self.policy is WritePolicy.WRITE_THROUGH:
            self.state.waiting[group].update(zip(blocks, names, strict=True))

    def load(self, group: int, host_blocks: Int32Array, device_blocks: Int32Array) -> None:
        self.host.pin(group, host_blocks)
        # A request that ends or is retracted before a forward waited for the load must not free its target.
        self.pool.share(group, device_blocks)
        self.state.loading[group][device_blocks] = True
        self.operations.add(Load(group=group, host_blocks=host_blocks, device_blocks=device_blocks))

    def is_loading(self, group: int, blocks: Int32Array) -> bool:
        """Whether an open load writes one of these device blocks."""
        return bool(self.state.loading[group][blocks].any())

    def take_ops(self) -> tuple[CacheOp, ...]:
        room = STORED_PER_PLAN
        for group in range(self.pool.groups):
            if self.state.evicted[group]:
                self._store_evicted(group)
            if self.state.waiting[group] and room:
                room -= self._write_through(group, room)
        return self.operations.take()

    def acked(self, acks: CacheAcks) -> list[Work]:
        """Returns: what the acknowledgments are of."""
        works = self.operations.done(acks)
        for work in works:
            if isinstance(work, Store):
                self._stored(work)
            elif isinstance(work, Load):
                self._loaded(work)
        return works

    def holds_alone(self) -> bool:
        return any(
            self.pool.held_alone(work.group, work.device_blocks)
            for work in self.operations.works()
            if isinstance(work, Load) or (isinstance(work, Store) and not work.ordered)
        )

    def clear(self) -> None:
        for waiting in self.state.waiting:
            waiting.clear()
        self.host.clear()

    def _store_evicted(self, group: int) -> None:
        evicted = self.state.evicted[group]
        names = [name for name in evicted if self.host.holds(group, name) is None]
        host_blocks = self.host.reserve(group, names, certain=True)
        if len(host_blocks):
            blocks = int32([evicted[name] for name in names[: len(host_blocks)]])
            self.operations.add(Store(group=group, device_blocks=blocks, host_blocks=host_blocks, ordered=True))
        evicted.clear()

    def _write_through(self, group: int, room: int) -> int:
        """Store up to `room` blocks; returns how many."""
        waiting = self.state.waiting[group]
        turn: dict[bytes, int] = {}
        known: list[int] = []
        for block, name in waiting.items():
            if len(turn) == room:
                break
            if self.host.holds(group, name) is None and name not in turn:
                turn[name] = block
            else:
                known.append(block)
        for block in known:
            del waiting[block]
        turn = self._pinnable(group, turn)
        host_blocks = self.host.reserve(group, tuple(turn), certain=True)
        count = len(host_blocks)
        if not count:
            return 0
        blocks = int32(tuple(turn.values())[:count])
        self.pool.share(group, blocks)
        for block in blocks.tolist():
            del waiting[block]
        self.operations.add(Store(group=group, device_blocks=blocks, host_blocks=host_blocks, ordered=False))
        return count

    def _pinnable(self, group: int, turn: dict[bytes, int]) -> dict[bytes, int]:
        """Those that can be pinned without breaking a promise. The others wait; if evicted, they are stored then."""
        blocks = int32(tuple(turn.values()))
        if not self.pool.idle_among(group, blocks):
            return turn
        hits = [int32(())] * self.pool.groups
        hits[group] = blocks
        if self.pool.fits([0] * self.pool.groups, hits):
            return turn
        return {name: block for name, block in turn.items() if self.pool.references(group, block)}

    def _stored(self, work: Store) -> None:
        self.host.wrote(work.group, work.host_blocks)
        self.host.unpin(work.group, work.host_blocks)
        if not work.ordered:
            self.pool.release(work.group, work.device_blocks[::-1])

    def _loaded(self, work: Load) -> None:
        self.host.unpin(work.group, work.host_blocks)
        self.state.loading[work.group][work.device_blocks] = False
        self.pool.release(work.group, work.device_blocks[::-1])


def host_tier(policy: WritePolicy, pool: Pool, host: HostBlocks, operations: Operations) -> HostTier:
    """`pool` is the device's."""
    groups = range(pool.groups)
    return HostTier(
        policy=policy,
        pool=pool,
        host=host,
        operations=operations,
        state=TierState(
            waiting=tuple({} for _ in groups),
            evicted=tuple({} for _ in groups),
            loading=tuple(np.zeros(pool.blocks_in(group), dtype=np.bool_) for group in groups),
        ),
    )
