"""The pool for several cache groups, whose blocks are packed into common parents.

Accounting. Let R be the parents without an active block, and ``slack[g]`` the blocks of group g that are
not active, inside parents of g that have an active one. A demand for ``T[g]`` blocks of each group can be
met exactly if ``sum over g of ceil(max(0, T[g] - slack[g]) / k[g]) <= R``: what the slack does not give
comes in whole parents. The demand is the promises and what is being asked for; every operation keeps a
demand that could be met.

So a group may open a parent (give it its first active block) only while R exceeds what the *other* groups
need of it; else it takes blocks from its slack, where then is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import EMPTY_INT32
from tokenspeed.scheduler.packed_state import NOBODY, GroupState, ParentState, descending, group_state
from tokenspeed.scheduler.pool import Evicted, Pool, PoolContents, released_too_often, single_group_pool


@attrs.frozen(kw_only=True, eq=False)
class PackedPool:
    """Meets `Pool`. Everything is done in arrays but for blocks and parents that change their class."""

    lanes: tuple[GroupState, ...]
    parents: ParentState

    @property
    def groups(self) -> int:
        return len(self.lanes)

    @property
    def usable(self) -> int:
        return len(self.parents.owner) - 1

    @property
    def active(self) -> int:
        return self.usable - self.parents.closed

    @property
    def cached(self) -> int:
        return len(self.parents.cached)

    @property
    def empty(self) -> int:
        return self.parents.top

    def blocks_in(self, group: int) -> int:
        return len(self.lanes[group].refs)

    def references(self, group: int, block: int) -> int:
        return int(self.lanes[group].refs[block])

    def idle_among(self, group: int, blocks: Int32Array) -> int:
        return len(blocks) - int(np.count_nonzero(self.lanes[group].refs[blocks]))

    def held_alone(self, group: int, blocks: Int32Array) -> int:
        return int(np.count_nonzero(self.lanes[group].refs[blocks] == 1))

    def fits(self, want: Sequence[int], hits: Sequence[Int32Array] = ()) -> bool:
        room = self.parents.closed
        for group, lane in enumerate(self.lanes):
            slack = lane.slack
            if hits and len(hits[group]):
                woken = hits[group][lane.refs[hits[group]] == 0]
                revived = self._closed_among(lane, woken)
                room -= len(revived)
                slack += lane.k * len(revived) - len(woken)
            lacking = lane.promised + want[group] - slack
            if lacking > 0:
                room -= -(-lacking // lane.k)
        return room >= 0

    def take(self, group: int, count: int) -> tuple[Int32Array, tuple[Evicted, ...]]:
        lane = self.lanes[group]
        # Parents that this group may open: the rest is for the promises to the others.
        openable = self.parents.closed - sum(other.need for other in self.lanes if other is not lane)
        if lane.promised + count > lane.slack + openable * lane.k:
            raise InvariantBroken(
                "more blocks taken than there are", group=group, count=count, promised=self._promised(), room=openable
            )
        parts: list[Int32Array] = []
        evicted: list[Evicted] = []
        while count > 0:
            closed = self.parents.closed
            part = self._from_slack(group, count)
            if not len(part):
                part = self._open_partial(group, count, openable)
            if not len(part):
                part = self._open_empty(group, count, openable)
            if not len(part):
                part = self._evict(group, count, openable, evicted)
            openable -= closed - self.parents.closed
            count -= len(part)
            parts.append(part)
        if len(parts) == 1:
            return parts[0], tuple(evicted)
        return (np.concatenate(parts) if parts else EMPTY_INT32), tuple(evicted)

    def share(self, group: int, blocks: Int32Array) -> None:
        lane, parents = self.lanes[group], self.parents
        counts = lane.refs[blocks]
        if counts.all():
            lane.refs[blocks] = counts + 1
            return
        woken = blocks[counts == 0]
        if not lane.findable[woken].all():
            raise InvariantBroken("an empty block was shared", group=group, blocks=blocks[counts == 0].tolist())
        revived = self._closed_among(lane, woken)
        lane.refs[blocks] = counts + 1
        for block in woken.tolist():
            del lane.idle[block]
            lane.near.pop(block, None)
        np.add.at(parents.live, woken // lane.k, 1)
        lane.slack -= len(woken)
        self._revive(lane, revived)

    def release(self, group: int, blocks: Int32Array) -> None:
        if not len(blocks):
            return
        lane = self.lanes[group]
        counts = lane.refs[blocks] - 1
        least = counts.min()
        if least < 0:
            raise released_too_often(group, blocks[counts < 0])
        lane.refs[blocks] = counts
        if least:
            return
        gone = blocks if not counts.any() else blocks[counts == 0]
        self._retire(lane, gone)

    def mark_findable(self, group: int, blocks: Sequence[int] | Int32Array) -> None:
        if len(blocks):
            self.lanes[group].findable[blocks] = True

    def forget(self, group: int, block: int) -> None:
        lane = self.lanes[group]
        lane.findable[block] = False
        if block not in lane.idle:
            return
        del lane.idle[block]
        parent = block // lane.k
        if self.parents.live[parent]:
            del lane.near[block]
            self._stack(lane, np.array([block], dtype=np.int32))
        elif not lane.findable[parent * lane.k : (parent + 1) * lane.k].any():
            del self.parents.cached[parent]
            lane.partial.pop(parent, None)
            self._empty_out([parent])
        else:
            lane.partial[parent] = None

    def discard_all_idle(self) -> None:
        for lane in self.lanes:
            if not lane.idle:
                continue
            lane.findable[list(lane.idle)] = False
            lane.idle.clear()
            lane.partial.clear()
            if lane.near:
                self._stack(lane, np.array(list(lane.near), dtype=np.int32))
                lane.near.clear()
        self._empty_out(list(self.parents.cached))
        self.parents.cached.clear()

    def promise(self, group: int, count: int) -> None:
        self.lanes[group].promised += count

    def redeem(self, group: int, count: int) -> None:
        lane = self.lanes[group]
        lane.promised -= count
        if lane.promised < 0:
            raise InvariantBroken("more blocks redeemed than promised", group=group, count=count)

    def contents(self) -> PoolContents:
        return PoolContents(
            references=tuple(
                {block: int(lane.refs[block]) for block in lane.refs.nonzero()[0].tolist()} for lane in self.lanes
            ),
            idle=tuple(tuple(lane.idle) for lane in self.lanes),
            empty=tuple(self.parents.stack[: self.parents.top].tolist()),
            promised=self._promised(),
        )

    def _promised(self) -> tuple[int, ...]:
        return tuple(lane.promised for lane in self.lanes)

    def _closed_among(self, lane: GroupState, idle: Int32Array) -> Int32Array:
        """Distinct parents without an active block that the idle blocks lie in, ascending."""
        parents = idle // np.int32(lane.k)
        return np.unique(parents[self.parents.live[parents] == 0])

    def _from_slack(self, group: int, count: int) -> Int32Array:
        """Up to `count` empty blocks of the group's active parents; none only if there are none."""
        lane, parents = self.lanes[group], self.parents
        taken: list[int] = []
        while lane.top and len(taken) < count:
            lane.top -= 1
            block = int(lane.stack[lane.top])
            lane.stacked[block] = False
            home = block // lane.k
            if lane.refs[block] or lane.findable[block] or parents.owner[home] != group or not parents.live[home]:
                continue
            lane.refs[block] = 1
            parents.live[home] += 1
            taken.append(block)
        lane.slack -= len(taken)
        return np.array(taken, dtype=np.int32)

    def _open_partial(self, group: int, count: int, openable: int) -> Int32Array:
        """Up to `count` empty blocks of the group's cached parent that has been so for the shortest time."""
        lane = self.lanes[group]
        if openable < 1 or not lane.partial:
            return EMPTY_INT32
        parent: Int32Array = np.array([next(reversed(lane.partial))], dtype=np.int32)
        blocks = self._blocks_of(lane, parent)
        taken: Int32Array = blocks[(lane.refs[blocks] == 0) & ~lane.findable[blocks]][:count]
        lane.refs[taken] = 1
        lane.slack -= len(taken)
        self.parents.live[parent] = len(taken)
        self._revive(lane, parent)
        return taken

    def _open_empty(self, group: int, count: int, openable: int) -> Int32Array:
        lane, parents = self.lanes[group], self.parents
        n = min(-(-count // lane.k), parents.top, openable)
        if n <= 0:
            return EMPTY_INT32
        parents.top -= n
        return self._occupy(group, parents.stack[parents.top : parents.top + n][::-1].copy(), count)

    def _occupy(self, group: int, opened: Int32Array, count: int) -> Int32Array:
        """The first `count` blocks (or all) of parents that hold nothing."""
        lane, parents = self.lanes[group], self.parents
        blocks = self._blocks_of(lane, opened)
        taken, rest = blocks[:count], blocks[count:]
        parents.owner[opened] = group
        parents.live[opened] = lane.k
        if len(rest):
            parents.live[opened[-1]] = lane.k - len(rest)
            self._stack(lane, rest[::-1])
        lane.refs[taken] = 1
        lane.slack += len(rest)
        return taken

    def _evict(self, group: int, count: int, openable: int, evicted: list[Evicted]) -> Int32Array:
        """Idle blocks of the group, or the blocks of one cached parent, whichever were not used for longer."""
        lane = self.lanes[group]
        run = self._oldest_idle(lane, count, openable)
        if not run and openable > 0 and self.parents.cached:
            return self._take_parent(group, next(iter(self.parents.cached)), count, evicted)
        run = run or [next(iter(lane.near))]
        taken: Int32Array = np.array(run, dtype=np.int32)
        self.share(group, taken)
        lane.findable[taken] = False
        evicted.append(Evicted(group, tuple(run)))
        return taken

    def _oldest_idle(self, lane: GroupState, count: int, openable: int) -> list[int]:
        """Up to `count` idle blocks, oldest first: while none is younger than the oldest cached parent, no
        more than `openable` parents are opened, and none of these has an empty block, which goes first."""
        parents = self.parents
        rivals = iter(parents.cached.items())
        rival = next(rivals, None)
        opened: set[int] = set()
        run: list[int] = []
        for block, moment in lane.idle.items():
            while rival is not None and rival[0] in opened:
                rival = next(rivals, None)
            if len(run) == count or (openable > len(opened) and rival is not None and moment > rival[1]):
                break
            home = block // lane.k
            if not parents.live[home] and home not in opened:
                if len(opened) >= openable:
                    break
                opened.add(home)
                if not lane.findable[home * lane.k : (home + 1) * lane.k].all():
                    run.append(block)
                    break
            run.append(block)
        return run

    def _take_parent(self, group: int, parent: int, count: int, evicted: list[Evicted]) -> Int32Array:
        old = int(self.parents.owner[parent])
        owner = self.lanes[old]
        blocks = range(parent * owner.k, (parent + 1) * owner.k)
        gone = tuple(sorted((block for block in blocks if block in owner.idle), key=owner.idle.__getitem__))
        for block in gone:
            del owner.idle[block]
        owner.findable[blocks.start : blocks.stop] = False
        evicted.append(Evicted(old, gone))
        del self.parents.cached[parent]
        owner.partial.pop(parent, None)
        return self._occupy(group, np.array([parent], dtype=np.int32), count)

    def _revive(self, lane: GroupState, revived: Int32Array) -> None:
        """Closed parents that have active blocks now: their other blocks are slack."""
        if not len(revived):
            return
        for parent in revived.tolist():
            del self.parents.cached[parent]
            lane.partial.pop(parent, None)
        lane.slack += lane.k * len(revived)
        blocks = self._blocks_of(lane, revived)
        blocks = blocks[lane.refs[blocks] == 0]
        known = lane.findable[blocks]
        lane.near.update(dict.fromkeys(blocks[known].tolist()))
        self._stack(lane, blocks[~known][::-1])

    def _retire(self, lane: GroupState, gone: Int32Array) -> None:
        """`gone` have no reference any more."""
        parents = self.parents
        homes = gone // np.int32(lane.k)
        np.subtract.at(parents.live, homes, 1)
        known = lane.findable[gone]
        begin = parents.clock
        parents.clock += len(gone)
        if known.all():
            lane.idle.update(zip(gone.tolist(), range(begin, parents.clock), strict=True))
        else:
            lane.idle.update(zip(gone[known].tolist(), (begin + known.nonzero()[0]).tolist(), strict=True))
        lane.slack += len(gone)
        stays = parents.live[homes] > 0
        if stays.any():
            lane.near.update(dict.fromkeys(gone[stays & known].tolist()))
            self._stack(lane, gone[stays & ~known])
        if not stays.all():
            left = (~stays).nonzero()[0]
            self._close(lane, dict(zip(homes[left].tolist(), (begin + left).tolist(), strict=True)))

    def _close(self, lane: GroupState, last: dict[int, int]) -> None:
        """Parents without an active block now; each with the moment of its last one."""
        lane.slack -= lane.k * len(last)
        blocks = self._blocks_of(lane, np.fromiter(last, dtype=np.int32, count=len(last)))
        known = lane.findable[blocks]
        if lane.near:
            for block in blocks[known].tolist():
                lane.near.pop(block, None)
        by_parent = known.reshape(len(last), lane.k)
        keeps: list[bool] = np.logical_or.reduce(by_parent, axis=1).tolist()
        full: list[bool] = np.logical_and.reduce(by_parent, axis=1).tolist()
        kept = [item for item, keep in zip(last.items(), keeps, strict=True) if keep]
        kept.sort(key=lambda item: item[1])
        self.parents.cached.update(kept)
        partial = (parent for parent, keep, whole in zip(last, keeps, full, strict=True) if keep and not whole)
        lane.partial.update(dict.fromkeys(partial))
        self._empty_out([parent for parent, keep in zip(last, keeps, strict=True) if not keep])

    def _empty_out(self, gone: list[int]) -> None:
        parents, n = self.parents, len(gone)
        parents.owner[gone] = NOBODY
        parents.stack[parents.top : parents.top + n] = gone
        parents.top += n

    def _stack(self, lane: GroupState, blocks: Int32Array) -> None:
        """Empty blocks of active parents; the last given is the first taken."""
        blocks = blocks[~lane.stacked[blocks]]
        lane.stacked[blocks] = True
        lane.stack[lane.top : lane.top + len(blocks)] = blocks
        lane.top += len(blocks)

    def _blocks_of(self, lane: GroupState, parents: Int32Array) -> Int32Array:
        """int32 ``[parents * k]``."""
        blocks: Int32Array = np.add.outer(parents * np.int32(lane.k), np.arange(lane.k, dtype=np.int32))
        return blocks.reshape(-1)


def make_pool(num_parents: int, blocks_per_parent: tuple[int, ...]) -> Pool:
    """An empty pool of parents 1 .. num_parents - 1 for the groups whose blocks a parent holds so many of."""
    if blocks_per_parent == (1,):
        return single_group_pool(num_parents)
    return PackedPool(
        lanes=tuple(group_state(num_parents * k, k) for k in blocks_per_parent),
        parents=ParentState(
            owner=np.full(num_parents, NOBODY, dtype=np.int32),
            live=np.zeros(num_parents, dtype=np.int32),
            stack=descending(num_parents),
            top=num_parents - 1,
        ),
    )
