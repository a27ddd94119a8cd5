"""Blocks of the host tier: who is in them, who uses them, and which of them makes room.

A block is pinned while an operation reads or writes it, or while a retraction image needs it; the rest
goes least recently used first. A name is found only once the bytes are there (CT-9).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.plan import EMPTY_INT32
from tokenspeed.scheduler.packed import make_pool
from tokenspeed.scheduler.pool import Pool


@attrs.define(eq=False)
class HostGroup:
    """One cache group's side. Writer: HostBlocks.

    Attributes:
        block_of: by name, written or being written.
        name_of: the inverse.
        written: by block.
        coming: by block; it is being written from the device, which does not fail.
    """

    written: BoolArray
    coming: BoolArray
    block_of: dict[bytes, int] = attrs.field(factory=dict[bytes, int])
    name_of: dict[int, bytes] = attrs.field(factory=dict[int, bytes])


@attrs.frozen(kw_only=True, eq=False)
class HostBlocks:
    """`pool` counts a reference for each pin."""

    pool: Pool
    lanes: tuple[HostGroup, ...]

    def find(self, group: int, name: bytes) -> int | None:
        """The block whose bytes are there."""
        lane = self.lanes[group]
        block = lane.block_of.get(name)
        return block if block is not None and lane.written[block] else None

    def holds(self, group: int, name: bytes) -> int | None:
        """The block that has these bytes or is getting them."""
        return self.lanes[group].block_of.get(name)

    def keeps(self, group: int, block: int) -> bool:
        """Whether the bytes are there or certain to come."""
        lane = self.lanes[group]
        return bool(lane.written[block] or lane.coming[block])

    def all_written(self, group: int, blocks: Int32Array) -> bool:
        return bool(self.lanes[group].written[blocks].all())

    def reserve(self, group: int, names: Sequence[bytes], *, certain: bool = False) -> Int32Array:
        """Pinned blocks for the first of `names`, as many as there is room for; none of them is held yet.

        `certain`: the device writes them.
        """
        count = self._most(group, len(names))
        if not count:
            return EMPTY_INT32
        blocks, evicted = self.pool.take(group, count)
        for gone in evicted:
            for block in gone.blocks:
                self._drop(gone.group, block)
        lane = self.lanes[group]
        for block, name in zip(blocks.tolist(), names[:count], strict=True):
            lane.block_of[name] = block
            lane.name_of[block] = name
        lane.coming[blocks] = certain
        return blocks

    def wrote(self, group: int, blocks: Int32Array) -> None:
        """The bytes are there: they can be found from now on. The pin stays."""
        lane = self.lanes[group]
        known = blocks[[block in lane.name_of for block in blocks.tolist()]]
        lane.written[known] = True
        lane.coming[known] = False
        self.pool.mark_findable(group, known)

    def void(self, group: int, block: int) -> None:
        """What is being written into `block` is of no use."""
        if block in self.lanes[group].name_of:
            self._drop(group, block)
            self.pool.forget(group, block)

    def pin(self, group: int, blocks: Int32Array) -> None:
        self.pool.share(group, blocks)

    def unpin(self, group: int, blocks: Int32Array) -> None:
        """`blocks` in the order of a prefix: the deepest makes room first."""
        self.pool.release(group, blocks[::-1])

    def clear(self) -> None:
        """Forget every name; pinned blocks stay pinned until their operation is through."""
        for group, lane in enumerate(self.lanes):
            for block in tuple(lane.name_of):
                self.void(group, block)

    def contents(self) -> tuple[dict[bytes, int], ...]:
        """A copy by group: name to block, for those that can be found."""
        return tuple(
            {name: block for name, block in lane.block_of.items() if lane.written[block]} for lane in self.lanes
        )

    def _most(self, group: int, count: int) -> int:
        """How many blocks, at most `count`, can be had."""
        want = [0] * len(self.lanes)
        want[group] = count
        if self.pool.fits(want):
            return count
        low, high = 0, count
        while high - low > 1:
            want[group] = (low + high) // 2
            low, high = (want[group], high) if self.pool.fits(want) else (low, want[group])
        return low

    def _drop(self, group: int, block: int) -> None:
        lane = self.lanes[group]
        del lane.block_of[lane.name_of.pop(block)]
        lane.written[block] = lane.coming[block] = False


def host_blocks(num_parents: int, blocks_per_parent: tuple[int, ...]) -> HostBlocks:
    """Empty host memory of parents 1 .. num_parents - 1."""
    pool = make_pool(num_parents, blocks_per_parent)
    return HostBlocks(
        pool=pool,
        lanes=tuple(
            HostGroup(
                written=np.zeros(pool.blocks_in(group), dtype=np.bool_),
                coming=np.zeros(pool.blocks_in(group), dtype=np.bool_),
            )
            for group in range(pool.groups)
        ),
    )
