"""What the pool for several cache groups keeps: see `packed` for the accounting."""

from __future__ import annotations

from collections import OrderedDict

import attrs
import numpy as np

from tokenspeed.plane.messages import BoolArray, Int32Array

NOBODY = -1


@attrs.define(eq=False)
class GroupState:
    """Blocks of one group. Writer: PackedPool.

    Attributes:
        k: blocks a parent holds.
        refs, findable, stacked: by block.
        stack: ``[:top]`` contains every empty block of the group's active parents once, and blocks that
            were so and are not any more, which are passed over; ``stacked`` says which it contains.
        idle: block to the moment it became idle; least recent first.
        near: idle blocks in active parents.
        partial: cached parents that have an empty block.
        slack: see the module.
    """

    k: int
    refs: Int32Array
    findable: BoolArray
    stacked: BoolArray
    stack: Int32Array
    top: int = 0
    idle: OrderedDict[int, int] = attrs.field(factory=OrderedDict[int, int])
    near: OrderedDict[int, None] = attrs.field(factory=OrderedDict[int, None])
    partial: dict[int, None] = attrs.field(factory=dict[int, None])
    slack: int = 0
    promised: int = 0

    @property
    def need(self) -> int:
        """Parents that the promises will open."""
        return max(0, -(-(self.promised - self.slack) // self.k))


@attrs.define(eq=False)
class ParentState:
    """Writer: PackedPool.

    Attributes:
        owner: by parent, the group whose blocks it holds, or NOBODY if it is empty.
        live: by parent, its active blocks.
        stack: ``[:top]`` are the empty parents.
        cached: parents with idle blocks only, to the moment they became so; least recent first.
        clock: moments that have passed.
    """

    owner: Int32Array
    live: Int32Array
    stack: Int32Array
    top: int
    cached: OrderedDict[int, int] = attrs.field(factory=OrderedDict[int, int])
    clock: int = 0

    @property
    def closed(self) -> int:
        """Parents without an active block: R of the module."""
        return self.top + len(self.cached)


def descending(num_parents: int) -> Int32Array:
    parents: Int32Array = np.arange(num_parents - 1, 0, -1, dtype=np.int32)
    return parents


def group_state(blocks: int, k: int) -> GroupState:
    return GroupState(
        k=k,
        refs=np.zeros(blocks, dtype=np.int32),
        findable=np.zeros(blocks, dtype=np.bool_),
        stacked=np.zeros(blocks, dtype=np.bool_),
        stack=np.zeros(blocks, dtype=np.int32),
    )
