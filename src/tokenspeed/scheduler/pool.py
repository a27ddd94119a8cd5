"""Pools of blocks: who owns what is counted here, what the blocks contain is not known here.

Memory is divided into parents, each of which holds ``k`` blocks of one cache group at a time; block b of
a group lies in parent ``b // k``. A block is *active* (referenced), *idle* (findable by an index, but
referenced by nobody) or *empty*. A parent is *active* if one of its blocks is, *cached* if it holds idle
blocks only, else *empty*. Parent 0 is the null parent: in no class, never granted, never counted (SP-52).

Promises keep blocks back for those who will take them later; every promise made of what `fits` can be
redeemed. Whoever wants blocks of several groups promises them all before it takes the first: which
blocks a take chooses is nobody else's business otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import BoolArray, Int32Array

NULL_BLOCK = 0


@attrs.frozen
class Evicted:
    """Blocks of `group` that were idle and are somebody else's now, in the order of their eviction."""

    group: int
    blocks: tuple[int, ...]


@attrs.frozen(kw_only=True)
class PoolContents:
    """A copy for diagnostics.

    Attributes:
        references: of active blocks, by group.
        idle: blocks by group, least recently released first.
        empty: parents that hold nothing.
        promised: blocks by group.
    """

    references: tuple[Mapping[int, int], ...]
    idle: tuple[tuple[int, ...], ...]
    empty: tuple[int, ...]
    promised: tuple[int, ...]


class Pool(Protocol):
    """Arrays of blocks are int32, and the blocks in one array are distinct.

    numpy indexes with int64 several times faster, even where it has to be made for the purpose.
    """

    @property
    def groups(self) -> int: ...

    @property
    def usable(self) -> int:
        """Parents without the null parent; always ``active + cached + empty``."""
        ...

    @property
    def active(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def empty(self) -> int: ...

    def blocks_in(self, group: int) -> int:
        """One more than the largest block id of `group`; the null parent's are counted."""
        ...

    def references(self, group: int, block: int) -> int: ...

    def idle_among(self, group: int, blocks: Int32Array) -> int: ...

    def held_alone(self, group: int, blocks: Int32Array) -> int:
        """How many of a holder's blocks nobody else refers to."""
        ...

    def fits(self, want: Sequence[int], hits: Sequence[Int32Array] = ()) -> bool:
        """Whether ``want[g]`` blocks of every group g can be taken without breaking a promise, once each
        of ``hits[g]`` has one more reference."""
        ...

    def take(self, group: int, count: int) -> tuple[Int32Array, tuple[Evicted, ...]]:
        """Grant `count` blocks: empty ones first, then those idle for longest.

        Returns: int32 ``[count]``, each referenced once; and what was evicted for them, usually (),
            which the caller must make unfindable before anything else happens.
        Raises: InvariantBroken: not so many can be had without breaking a promise.
        """
        ...

    def share(self, group: int, blocks: Int32Array) -> None:
        """One more reference on each of `blocks` (active or idle)."""
        ...

    def release(self, group: int, blocks: Int32Array) -> None:
        """One reference less on each of `blocks`.

        Give the deepest block of a chain first: then no prefix grows old before what extends it.
        """
        ...

    def mark_findable(self, group: int, blocks: Sequence[int] | Int32Array) -> None:
        """`blocks` are active, and an index knows them from now on."""
        ...

    def forget(self, group: int, block: int) -> None:
        """No index knows the active or idle `block` any more; an idle one becomes empty."""
        ...

    def discard_all_idle(self) -> None: ...

    def promise(self, group: int, count: int) -> None: ...

    def redeem(self, group: int, count: int) -> None:
        """Promised blocks that are taken next, or will not be."""
        ...

    def contents(self) -> PoolContents: ...


@attrs.define(eq=False)
class PoolState:
    """Writer: BlockPool.

    ``stack[:top]`` are the empty blocks. ``idle``: least recently released first.
    """

    refs: Int32Array
    findable: BoolArray
    stack: Int32Array
    top: int
    idle: OrderedDict[int, None] = attrs.field(factory=OrderedDict[int, None])
    promised: int = 0


@attrs.frozen(kw_only=True, eq=False)
class BlockPool:
    """One cache group with a block a parent: the fast path."""

    state: PoolState

    @property
    def groups(self) -> int:
        return 1

    @property
    def usable(self) -> int:
        return len(self.state.refs) - 1

    @property
    def active(self) -> int:
        return self.usable - self.state.top - len(self.state.idle)

    @property
    def cached(self) -> int:
        return len(self.state.idle)

    @property
    def empty(self) -> int:
        return self.state.top

    def blocks_in(self, group: int) -> int:
        del group
        return len(self.state.refs)

    def references(self, group: int, block: int) -> int:
        del group
        return int(self.state.refs[block])

    def idle_among(self, group: int, blocks: Int32Array) -> int:
        del group
        return len(blocks) - int(np.count_nonzero(self.state.refs[blocks]))

    def held_alone(self, group: int, blocks: Int32Array) -> int:
        del group
        return int(np.count_nonzero(self.state.refs[blocks] == 1))

    def fits(self, want: Sequence[int], hits: Sequence[Int32Array] = ()) -> bool:
        state = self.state
        need = want[0] + state.promised
        if hits and len(hits[0]):
            need += self.idle_among(0, hits[0])
        return need <= state.top + len(state.idle)

    def take(self, group: int, count: int) -> tuple[Int32Array, tuple[Evicted, ...]]:
        state = self.state
        if count > state.top + len(state.idle) - state.promised:
            raise InvariantBroken(
                "more blocks taken than there are",
                group=group,
                count=count,
                empty=state.top,
                idle=len(state.idle),
                promised=state.promised,
            )
        fresh = min(count, state.top)
        state.top -= fresh
        blocks = state.stack[state.top : state.top + fresh][::-1].copy()
        evicted: tuple[Evicted, ...] = ()
        if fresh < count:
            gone = tuple(state.idle.popitem(last=False)[0] for _ in range(count - fresh))
            reused: Int32Array = np.array(gone, dtype=np.int32)
            state.findable[reused] = False
            blocks = np.concatenate([blocks, reused])
            evicted = (Evicted(0, gone),)
        state.refs[blocks.astype(np.int64)] = 1
        return blocks, evicted

    def share(self, group: int, blocks: Int32Array) -> None:
        state = self.state
        at = blocks.astype(np.int64)
        counts = state.refs[at]
        if not counts.all():
            for block in blocks[counts == 0].tolist():
                if block not in state.idle:
                    raise InvariantBroken("an empty block was shared", group=group, block=block)
                del state.idle[block]
        state.refs[at] = counts + 1

    def release(self, group: int, blocks: Int32Array) -> None:
        state = self.state
        if not len(blocks):
            return
        at = blocks.astype(np.int64)
        counts = state.refs[at] - 1
        least = counts.min()
        if least < 0:
            raise released_too_often(group, blocks[counts < 0])
        state.refs[at] = counts
        if least:
            return
        gone = blocks[counts == 0]
        keep = state.findable[gone]
        state.idle.update(dict.fromkeys(gone[keep].tolist()))
        empty = gone[~keep]
        state.stack[state.top : state.top + len(empty)] = empty
        state.top += len(empty)

    def mark_findable(self, group: int, blocks: Sequence[int] | Int32Array) -> None:
        del group
        if len(blocks):
            self.state.findable[np.asarray(blocks, dtype=np.int64)] = True

    def forget(self, group: int, block: int) -> None:
        del group
        state = self.state
        state.findable[block] = False
        if block in state.idle:
            del state.idle[block]
            state.stack[state.top] = block
            state.top += 1

    def discard_all_idle(self) -> None:
        for block in tuple(self.state.idle):
            self.forget(0, block)

    def promise(self, group: int, count: int) -> None:
        del group
        self.state.promised += count

    def redeem(self, group: int, count: int) -> None:
        self.state.promised -= count
        if self.state.promised < 0:
            raise InvariantBroken("more blocks redeemed than promised", group=group, count=count)

    def contents(self) -> PoolContents:
        state = self.state
        active = state.refs.nonzero()[0].tolist()
        return PoolContents(
            references=({block: int(state.refs[block]) for block in active},),
            idle=(tuple(state.idle),),
            empty=tuple(state.stack[: state.top].tolist()),
            promised=(state.promised,),
        )


def released_too_often(group: int, blocks: Int32Array) -> InvariantBroken:
    return InvariantBroken("a block released more often than referenced", group=group, blocks=blocks.tolist())


def single_group_pool(num_parents: int) -> BlockPool:
    """Blocks 1 .. num_parents - 1, all empty."""
    return BlockPool(
        state=PoolState(
            refs=np.zeros(num_parents, dtype=np.int32),
            findable=np.zeros(num_parents, dtype=np.bool_),
            stack=np.arange(num_parents - 1, 0, -1, dtype=np.int32),
            top=num_parents - 1,
        )
    )
