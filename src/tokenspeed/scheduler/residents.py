"""Seated requests: slots, block tables, and the blocks they hold.

Each cache group has its tables, int32 ``[slots, blocks]``. Every entry that changes is noted, and a
plan carries the changes to the device, which keeps the same tables by slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import IndexArray, Int32Array
from tokenspeed.plane.plan import BlockCopy, BlockGrants, GroupBlocks, int32
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.groups import Group, Kind
from tokenspeed.scheduler.hits import NOWHERE, GroupHit, Hit
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.prefix import PrefixCache, Relink

ONE: IndexArray = np.array(1, dtype=np.int64)  # numpy adds it faster than a Python int


@attrs.define(eq=False)
class GroupTables:
    """One cache group's side of the seated requests. Writer: Residents.

    Attributes:
        blocks: int32 ``[slots, blocks]``; entries ``first[slot] .. held[slot] - 1`` of a line are in use.
        first: int32 ``[slots]``; above 0 where a window has moved on.
        held: int64 ``[slots]``; it indexes ``blocks``.
        cover: int32 ``[slots]``, what `held` will be when the prompt is computed.
        owed: int32 ``[slots]``, promised blocks not taken yet.
        touched: (slots, indices, blocks) of changed entries since the last plan with a batch.
        granted: blocks taken since the last plan that must be clean.
    """

    blocks: Int32Array
    first: Int32Array
    held: IndexArray
    cover: Int32Array
    owed: Int32Array
    touched: list[tuple[IndexArray, IndexArray, Int32Array]] = attrs.field(factory=list)
    granted: list[Int32Array] = attrs.field(factory=list)


@attrs.define(eq=False)
class ResidentState:
    """Writer: Residents.

    Attributes:
        owner: int32 ``[slots]``, row or -1.
        goal: int32 ``[slots]``, tokens known at admission: prefill computes up to there.
        limit: int32 ``[slots]``, tokens whose KV the request may ever fill: the last one needs none.
        tables: the groups' block tables.
        copies: for the plan under construction.
        displaced: (forward, group, block): given back once that many forwards have landed.
        shrunk: entries were given up or replaced since the last plan with a batch, some perhaps among the touched.
    """

    owner: Int32Array
    goal: Int32Array
    limit: Int32Array
    empty_slots: list[int]
    groups: tuple[GroupTables, ...]
    tables: tuple[Int32Array, ...]
    copies: list[BlockCopy] = attrs.field(factory=list[BlockCopy])
    displaced: deque[tuple[int, int, int]] = attrs.field(factory=deque)
    shrunk: bool = False


class Loads(Protocol):
    def load(self, group: int, host_blocks: Int32Array, device_blocks: Int32Array) -> None:
        """The plan under construction copies these from the host tier, one to one."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Residents:
    config: SchedulerConfig
    groups: tuple[Group, ...]
    table: RequestTable
    pool: Pool
    cache: PrefixCache
    state: ResidentState
    windows: tuple[Group, ...] = attrs.field(init=False)

    @windows.default
    def _windows(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kind is Kind.WINDOW)

    @property
    def seated(self) -> int:
        return self.config.request_slots - len(self.state.empty_slots)

    @property
    def tables(self) -> tuple[Int32Array, ...]:
        """Block tables by group."""
        return self.state.tables

    def seat(self, row: int, hit: Hit, loads: Loads, *, goal: int, limit: int, cover: int) -> int:
        """Give `row` a slot and what was found; blocks for the rest of its first `cover` tokens are promised."""
        state = self.state
        slot = state.empty_slots.pop()
        self.table.seat(row, slot)
        state.owner[slot], state.goal[slot], state.limit[slot] = row, goal, limit
        # All references first: what one group takes must not evict what another has found.
        for group, found in zip(self.groups, hit.groups, strict=True):
            self.pool.share(group.number, found.shared)
        for group, found in zip(self.groups, hit.groups, strict=True):
            self._seat_group(group, slot, found, cover=group.blocks_for(cover))
        for group, found in zip(self.groups, hit.groups, strict=True):
            self._fill(group, slot, found, loads)
        self.cache.seat(row, slot, hit)
        return slot

    def _seat_group(self, group: Group, slot: int, found: GroupHit, *, cover: int) -> None:
        tables = self.state.groups[group.number]
        tables.first[slot], tables.held[slot], tables.cover[slot] = found.first, found.end, cover
        owed = group.new_blocks(cover=cover, found=found.end) + len(found.loaded)
        tables.owed[slot] = owed
        self.pool.promise(group.number, owed)
        tables.blocks[slot, found.first : found.end] = found.device

    def _fill(self, group: Group, slot: int, found: GroupHit, loads: Loads) -> None:
        """Take blocks for what comes from the host tier, and for the private copy of the boundary block."""
        number, tables = group.number, self.state.groups[group.number]
        missing = (found.device == NOWHERE).nonzero()[0]
        if len(missing):
            got = self._take_owed(group, slot, len(missing), clean=False)
            tables.blocks[slot, found.first + missing] = got
            loads.load(number, found.loaded, got)
        if found.end > found.first:
            self._touch(number, slot, found.first, found.end)
        if found.source != NOWHERE:
            self._copy_to_new(group, slot, found.source)
        elif found.host_source != NOWHERE:
            own = self._append(group, slot, 1, clean=False)
            loads.load(number, int32([found.host_source]), own)

    def _copy_to_new(self, group: Group, slot: int, source: int) -> None:
        own = int(self._append(group, slot, 1, clean=False)[0])
        if own != source:  # it may have been evicted for this very purpose
            self.state.copies.append(BlockCopy(group=group.number, source=source, destination=own))

    def append(self, group: int, slot: int, count: int) -> Int32Array:
        """Take `count` blocks for the table's end, which this plan fills whole (SP-40)."""
        return self._append(self.groups[group], slot, count, clean=False)

    def extend(self, slot: int, *, tokens: int) -> bool:
        """Take blocks until `slot` covers `tokens` tokens; False, and nothing is taken, if they cannot be had.

        What was promised can be had always. A window that others share may need more than that.
        """
        state = self.state
        counts, beyond = [], []
        for group, tables in zip(self.groups, state.groups, strict=True):
            count = max(0, group.blocks_for(tokens) - int(tables.held[slot]))
            counts.append(count)
            beyond.append(max(0, count - int(tables.owed[slot])))
        if any(beyond):
            if not self.pool.fits(beyond):
                return False
            # Promised first: what one group takes must not be what another was said to get.
            for group, tables, count in zip(self.groups, state.groups, beyond, strict=True):
                tables.owed[slot] += count
                self.pool.promise(group.number, count)
        for group, count in zip(self.groups, counts, strict=True):
            if count:
                self._append(group, slot, count, clean=True)
        return True

    def extend_each(self, parts: Sequence[IndexArray]) -> None:
        """One more block of every group g, beyond any promise, for each slot of ``parts[g]``; they fit."""
        # Promised first: what one group takes must not be what another was said to get.
        for group, slots in enumerate(parts):
            self.pool.promise(group, len(slots))
        for group, slots in enumerate(parts):
            self.pool.redeem(group, len(slots))
            if len(slots):
                self._extend_group(group, slots)

    def _extend_group(self, group: int, slots: IndexArray) -> None:
        tables = self.state.groups[group]
        got = self.cache.claim(group, len(slots))
        at = tables.held[slots]
        tables.blocks[slots, at] = got
        tables.held[slots] = at + ONE
        self._granted(group, got, clean=True)
        tables.touched.append((slots, at, got))

    def lacking(self, slot: int) -> list[int]:
        """By group, 1 if the slot's next decode lacks a block."""
        row = int(self.state.owner[slot])
        tokens = int(self.table.schedule.scheduled[row]) + 1 + self.config.ahead_tokens
        tokens = min(tokens, int(self.state.limit[slot]))
        return [
            int(group.by_position and group.blocks_for(tokens) > int(tables.held[slot]))
            for group, tables in zip(self.groups, self.state.groups, strict=True)
        ]

    def move_state(self, group: Group, slot: int) -> int:
        """The slot's state goes on in a new block; returns the old one, whose reference the caller now has."""
        tables = self.state.groups[group.number]
        old = int(tables.blocks[slot, 0])
        got = self.cache.claim(group.number, 1)
        self._granted(group.number, got, clean=False)
        tables.blocks[slot, 0] = got[0]
        self.state.copies.append(BlockCopy(group=group.number, source=old, destination=int(got[0])))
        self._touch(group.number, slot, 0, 1)
        return old

    def release_behind(self, slots: IndexArray, ends: Int32Array) -> None:
        """Give up blocks that no forward from `ends` on reads."""
        for group in self.windows:
            tables = self.state.groups[group.number]
            seen = group.first_seen_each(ends)
            moved = (seen > tables.first[slots]).nonzero()[0]
            for slot, first in zip(slots[moved].tolist(), seen[moved].tolist(), strict=True):
                self._advance_first(group, slot, min(first, int(tables.held[slot])))

    def _advance_first(self, group: Group, slot: int, first: int) -> None:
        tables = self.state.groups[group.number]
        begin = int(tables.first[slot])
        if first <= begin:
            return
        self.state.shrunk = True
        self.pool.release(group.number, tables.blocks[slot, begin:first].copy())
        tables.first[slot] = first
        held, cover = int(tables.held[slot]), int(tables.cover[slot])
        lacking = min(cover - held, group.peak - (held - first)) - int(tables.owed[slot])
        if lacking > 0 and self.pool.fits(self._only(group.number, lacking)):
            tables.owed[slot] += lacking
            self.pool.promise(group.number, lacking)

    def _only(self, group: int, count: int) -> list[int]:
        want = [0] * len(self.groups)
        want[group] = count
        return want

    def release_pages(self, slot: int) -> None:
        """Give back all blocks and what was promised; the deepest block first."""
        self.state.shrunk = True
        for number, tables in enumerate(self.state.groups):
            first, held = int(tables.first[slot]), int(tables.held[slot])
            self.pool.release(number, tables.blocks[slot, first:held][::-1].copy())
            self.pool.redeem(number, int(tables.owed[slot]))
            tables.first[slot] = tables.held[slot] = tables.owed[slot] = tables.cover[slot] = 0

    def leave(self, slot: int) -> None:
        """The slot may be given to another request."""
        for tables in self.state.groups:
            if tables.held[slot]:
                raise InvariantBroken("a slot left with pages", slot=slot, held=int(tables.held[slot]))
        self.state.owner[slot] = -1
        self.state.empty_slots.append(slot)

    def relink(self, relink: Relink, *, forward: int) -> None:
        """Refer to an equal block that others use; one's own goes when forwards up to `forward` landed."""
        tables = self.state.groups[relink.group]
        own = int(tables.blocks[relink.slot, relink.index])
        self.pool.share(relink.group, int32([relink.block]))
        tables.blocks[relink.slot, relink.index] = relink.block
        self.state.shrunk = True
        self.state.displaced.append((forward, relink.group, own))
        self._touch(relink.group, relink.slot, relink.index, relink.index + 1)

    def release_displaced(self, *, landed: int) -> None:
        displaced = self.state.displaced
        while displaced and displaced[0][0] <= landed:
            _, group, block = displaced.popleft()
            self.pool.release(group, int32([block]))

    def take_grants(self) -> tuple[BlockGrants, ...]:
        """Changed entries with their present content, for the device; one for each group that changed."""
        state, grants = self.state, []
        for number, tables in enumerate(state.groups):
            touched = tables.touched
            if not touched:
                continue
            slots, indices, blocks = (
                touched[0] if len(touched) == 1 else map(np.concatenate, zip(*touched, strict=True))
            )
            if state.shrunk:
                # Of what was given up again, or given twice, the present content counts.
                used = (indices < tables.held[slots]) & (indices >= tables.first[slots])
                slots, indices = slots[used], indices[used]
                blocks = tables.blocks[slots, indices]
            touched.clear()
            if len(slots):
                parts = (_own(slots), _own(indices), _own(blocks))
                grants.append(BlockGrants(group=number, slots=parts[0], indices=parts[1], blocks=parts[2]))
        state.shrunk = False
        return tuple(grants)

    def source_of(self, group: int, block: int) -> int:
        """Where the content of `block` is before the copies of the plan under construction."""
        pending = (copy for copy in self.state.copies if (copy.group, copy.destination) == (group, block))
        return next((copy.source for copy in pending), block)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies = self.state.copies
        if not copies:
            return ()
        taken = tuple(copies)
        copies.clear()
        return taken

    def take_granted(self) -> tuple[GroupBlocks, ...]:
        """Blocks that got a new owner since the last call and must be clean, each once."""
        zeroed = []
        for number, tables in enumerate(self.state.groups):
            if tables.granted:
                blocks = tuple(dict.fromkeys(block for part in tables.granted for block in part.tolist()))
                tables.granted.clear()
                zeroed.append(GroupBlocks(group=number, blocks=blocks))
        return tuple(zeroed)

    def _append(self, group: Group, slot: int, count: int, *, clean: bool) -> Int32Array:
        """Behind the table's end, out of what was promised and beyond."""
        tables = self.state.groups[group.number]
        first = int(tables.held[slot])
        got = self._take_owed(group, slot, count, clean=clean)
        tables.blocks[slot, first : first + count] = got
        tables.held[slot] = first + count
        self._touch(group.number, slot, first, first + count)
        return got

    def _take_owed(self, group: Group, slot: int, count: int, *, clean: bool) -> Int32Array:
        tables = self.state.groups[group.number]
        promised = min(count, int(tables.owed[slot]))
        tables.owed[slot] -= promised
        self.pool.redeem(group.number, promised)
        got = self.cache.claim(group.number, count)
        self._granted(group.number, got, clean=clean)
        return got

    def _granted(self, group: int, blocks: Int32Array, *, clean: bool) -> None:
        """Note what must be zeroed, and drop what was meant for an earlier owner of the same plan.

        A copy's destination must not be zeroed behind the copy, nor a block be copied to for nobody (SP-37).
        """
        copies, granted = self.state.copies, self.state.groups[group].granted
        if copies or granted:
            again = set(blocks.tolist())
            copies[:] = [copy for copy in copies if copy.group != group or copy.destination not in again]
            if granted and not clean:
                granted[:] = [part[~np.isin(part, blocks)] for part in granted]
        if clean and (self.groups[group].zero or self.config.zero_new_blocks):
            granted.append(blocks)

    def _touch(self, group: int, slot: int, first: int, last: int) -> None:
        tables = self.state.groups[group]
        tables.touched.append(
            (
                np.full(last - first, slot, dtype=np.int64),
                np.arange(first, last, dtype=np.int64),
                tables.blocks[slot, first:last].copy(),
            )
        )


Array = TypeVar("Array", IndexArray, Int32Array)


def _own(array: Array) -> Array:
    """`array` with memory of its own, read-only from here on: it crosses to the device side."""
    if array.base is not None:
        array = array.copy()
    array.setflags(write=False)
    return array


def resident_state(config: SchedulerConfig, groups: tuple[Group, ...]) -> ResidentState:
    slots = config.request_slots

    def column() -> Int32Array:
        return np.zeros(slots, dtype=np.int32)

    def tables(group: Group) -> GroupTables:
        width = group.blocks_for(config.max_model_len)
        blocks: Int32Array = np.zeros((slots, width), dtype=np.int32)
        held: IndexArray = np.zeros(slots, dtype=np.int64)
        return GroupTables(blocks=blocks, first=column(), held=held, cover=column(), owed=column())

    by_group = tuple(tables(group) for group in groups)
    return ResidentState(
        owner=np.full(slots, -1, dtype=np.int32),
        goal=column(),
        limit=column(),
        empty_slots=list(range(slots - 1, -1, -1)),
        groups=by_group,
        tables=tuple(part.blocks for part in by_group),
    )
