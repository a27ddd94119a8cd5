"""The pool of KV blocks: who owns what is counted here, what the blocks contain is not known here.

Every block but the null block is in exactly one class: *active* (referenced), *idle* (findable by the
prefix index, referenced by nobody) or *empty*. One cache group, so a parent is a block (H13).
"""

from __future__ import annotations

from collections import OrderedDict

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import BoolArray, Int32Array

NULL_BLOCK = 0


@attrs.define(eq=False)
class PoolState:
    """Writer: BlockPool.

    ``stack[:top]`` are the empty blocks. ``idle``: least recently released first. ``promised``: blocks
    that seated prompts will take chunk by chunk; nobody else may.
    """

    refs: Int32Array
    findable: BoolArray
    stack: Int32Array
    top: int
    idle: OrderedDict[int, None] = attrs.field(factory=OrderedDict[int, None])
    promised: int = 0


@attrs.frozen(kw_only=True, eq=False)
class BlockPool:
    """Reference counts, the stack of empty blocks, and the LRU order of idle ones."""

    state: PoolState

    @property
    def usable(self) -> int:
        """Blocks without the null block."""
        return len(self.state.refs) - 1

    @property
    def empty(self) -> int:
        return self.state.top

    @property
    def idle(self) -> int:
        return len(self.state.idle)

    @property
    def active(self) -> int:
        return self.usable - self.state.top - len(self.state.idle)

    @property
    def spare(self) -> int:
        """Blocks that can be taken without breaking a promise."""
        return self.state.top + len(self.state.idle) - self.state.promised

    def references(self, block: int) -> int:
        return int(self.state.refs[block])

    def idle_among(self, blocks: Int32Array) -> int:
        return int(np.count_nonzero(self.state.refs[blocks] == 0))

    def held_alone(self, blocks: Int32Array) -> int:
        """How many of a holder's blocks nobody else refers to."""
        return int(np.count_nonzero(self.state.refs[blocks] == 1))

    def take(self, count: int) -> tuple[Int32Array, tuple[int, ...]]:
        """Grant `count` blocks: empty ones first, then the idle ones released longest ago.

        Returns: int32 ``[count]``, each referenced once; and those among them that were idle, which
            the caller must make unfindable before anything else happens.
        """
        state = self.state
        if count > state.top + len(state.idle):
            raise InvariantBroken("more blocks taken than there are", count=count, empty=state.top, idle=self.idle)
        fresh = min(count, state.top)
        state.top -= fresh
        blocks = state.stack[state.top : state.top + fresh][::-1].copy()
        evicted: tuple[int, ...] = ()
        if fresh < count:
            evicted = tuple(state.idle.popitem(last=False)[0] for _ in range(count - fresh))
            reused: Int32Array = np.array(evicted, dtype=np.int32)
            state.findable[reused] = False
            blocks = np.concatenate([blocks, reused])
        state.refs[blocks] = 1
        return blocks, evicted

    def share(self, blocks: Int32Array) -> None:
        """One more reference on each of `blocks` (distinct, active or idle)."""
        state = self.state
        counts = state.refs[blocks]
        if not counts.all():
            for block in blocks[counts == 0].tolist():
                del state.idle[block]
        state.refs[blocks] = counts + 1

    def release(self, blocks: Int32Array) -> None:
        """One reference less on each of `blocks` (distinct).

        Give the deepest block of a chain first: then no prefix is evicted before what extends it.
        """
        state = self.state
        counts = state.refs[blocks] - 1
        if len(counts) and counts.min() < 0:
            raise InvariantBroken("a block released more often than referenced", blocks=blocks[counts < 0].tolist())
        state.refs[blocks] = counts
        gone = blocks[counts == 0]
        keep = state.findable[gone]
        state.idle.update(dict.fromkeys(gone[keep].tolist()))
        empty = gone[~keep]
        state.stack[state.top : state.top + len(empty)] = empty
        state.top += len(empty)

    def mark_findable(self, blocks: list[int]) -> None:
        self.state.findable[blocks] = True

    def discard_idle(self, block: int) -> None:
        """An idle block that nobody can find any more becomes empty."""
        state = self.state
        del state.idle[block]
        state.findable[block] = False
        state.stack[state.top] = block
        state.top += 1

    def discard_all_idle(self) -> None:
        for block in tuple(self.state.idle):
            self.discard_idle(block)

    def promise(self, count: int) -> None:
        self.state.promised += count

    def redeem(self, count: int) -> None:
        """Promised blocks that are taken now, or will not be."""
        self.state.promised -= count


def block_pool(num_pages: int) -> BlockPool:
    """A pool of blocks 1 .. num_pages - 1, all empty; block 0 is the null block and never granted."""
    stack: Int32Array = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
    return BlockPool(
        state=PoolState(
            refs=np.zeros(num_pages, dtype=np.int32),
            findable=np.zeros(num_pages, dtype=np.bool_),
            stack=stack,
            top=num_pages - 1,
        )
    )
