"""Seated requests: slots, block tables, and the pages they hold.

Block tables are int32 ``[slots, blocks]``. Every entry that changes is noted, and a plan with a batch
carries the changes to the device, which keeps the same tables by slot.
"""

from __future__ import annotations

from collections import deque

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import BlockGrants, int32
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.pool import BlockPool
from tokenspeed.scheduler.prefix import PrefixCache, Relink


@attrs.define(eq=False)
class ResidentState:
    """Writer: Residents.

    Attributes:
        owner: int32 ``[slots]``, row or -1.
        blocks: int32 ``[slots, blocks]``; the first ``held[slot]`` of a line are in use.
        goal: int32 ``[slots]``, tokens known at admission: prefill computes up to there.
        limit: int32 ``[slots]``, tokens whose KV the request may ever fill: the last one needs none.
        owed: int32 ``[slots]``, promised blocks not taken yet.
        touched: (slots, indices) of changed entries since the last plan with a batch.
        granted: blocks taken since the last plan.
        displaced: (forward, block): given back once that many forwards have landed.
    """

    owner: Int32Array
    blocks: Int32Array
    held: Int32Array
    goal: Int32Array
    limit: Int32Array
    owed: Int32Array
    empty_slots: list[int]
    touched: list[tuple[Int32Array, Int32Array]] = attrs.field(factory=list[tuple[Int32Array, Int32Array]])
    granted: list[Int32Array] = attrs.field(factory=list[Int32Array])
    displaced: deque[tuple[int, int]] = attrs.field(factory=deque[tuple[int, int]])


@attrs.frozen(kw_only=True, eq=False)
class Residents:
    config: SchedulerConfig
    table: RequestTable
    pool: BlockPool
    cache: PrefixCache
    state: ResidentState

    @property
    def has_seat(self) -> bool:
        return bool(self.state.empty_slots)

    @property
    def seated(self) -> int:
        return self.config.seats - len(self.state.empty_slots)

    def seat(self, row: int, hits: Int32Array, *, goal: int, limit: int, blocks: int) -> int:
        """Give `row` a slot and the matched blocks; `blocks` in all are promised to its prefill."""
        state = self.state
        slot = state.empty_slots.pop()
        self.table.seat(row, slot)
        count = len(hits)
        self.pool.share(hits)
        self.pool.promise(blocks - count)
        state.owner[slot], state.goal[slot], state.limit[slot] = row, goal, limit
        state.blocks[slot, :count] = hits
        state.held[slot], state.owed[slot] = count, blocks - count
        self.cache.seat(row, slot, hits=count)
        if count:
            self._touch(np.full(count, slot, dtype=np.int32), np.arange(count, dtype=np.int32))
        return slot

    def extend(self, slot: int, *, tokens: int) -> None:
        """Take promised blocks until `slot` holds `tokens` tokens."""
        state = self.state
        first = int(state.held[slot])
        last = self.config.blocks_for(tokens)
        count = last - first
        if count <= 0:
            return
        state.owed[slot] -= count
        self.pool.redeem(count)
        got = self.cache.claim(count)
        state.blocks[slot, first:last] = got
        state.held[slot] = last
        state.granted.append(got)
        self._touch(np.full(count, slot, dtype=np.int32), np.arange(first, last, dtype=np.int32))

    def extend_each(self, slots: Int32Array) -> None:
        """One more block, beyond any promise, for each of `slots`."""
        state = self.state
        got = self.cache.claim(len(slots))
        at = state.held[slots]
        state.blocks[slots, at] = got
        state.held[slots] = at + 1
        state.granted.append(got)
        self._touch(slots, at)

    def held_alone(self, slot: int) -> int:
        """Blocks that would become available if `slot` gave up its pages."""
        state = self.state
        return self.pool.held_alone(state.blocks[slot, : int(state.held[slot])])

    def release_pages(self, slot: int) -> None:
        """Give back all pages and what was promised; the deepest block first."""
        state = self.state
        count = int(state.held[slot])
        self.pool.release(state.blocks[slot, :count][::-1].copy())
        self.pool.redeem(int(state.owed[slot]))
        state.held[slot] = state.owed[slot] = 0

    def leave(self, slot: int) -> None:
        """The slot may be given to another request."""
        if self.state.held[slot]:
            raise InvariantBroken("a slot left with pages", slot=slot, held=int(self.state.held[slot]))
        self.state.owner[slot] = -1
        self.state.empty_slots.append(slot)

    def relink(self, relink: Relink, *, forward: int) -> None:
        """Refer to an equal block that others use; one's own goes when forwards up to `forward` landed."""
        state = self.state
        own = int(state.blocks[relink.slot, relink.index])
        self.pool.share(int32([relink.block]))
        state.blocks[relink.slot, relink.index] = relink.block
        state.displaced.append((forward, own))
        self._touch(int32([relink.slot]), int32([relink.index]))

    def release_displaced(self, *, landed: int) -> None:
        displaced = self.state.displaced
        while displaced and displaced[0][0] <= landed:
            self.pool.release(int32([displaced.popleft()[1]]))

    def take_grants(self) -> tuple[BlockGrants, ...]:
        """Changed entries with their present content, for the device."""
        state = self.state
        touched = state.touched
        if not touched:
            return ()
        if len(touched) == 1:
            slots, indices = touched[0]
        else:
            slots = np.concatenate([part[0] for part in touched])
            indices = np.concatenate([part[1] for part in touched])
        touched.clear()
        held = indices < state.held[slots]
        if not held.all():  # given up again while this plan was built
            slots, indices = slots[held], indices[held]
            if not len(slots):
                return ()
        blocks = state.blocks[slots, indices]
        for array in (slots, indices, blocks):
            array.setflags(write=False)
        return (BlockGrants(slots=slots, indices=indices, blocks=blocks),)

    def take_granted(self) -> tuple[int, ...]:
        """Blocks that got a new owner since the last call, each once; none unless they must be zeroed."""
        granted = self.state.granted
        if not granted:
            return ()
        parts = granted if self.config.zero_new_blocks else []
        blocks = tuple(dict.fromkeys(block for part in parts for block in part.tolist()))
        granted.clear()
        return blocks

    def _touch(self, slots: Int32Array, indices: Int32Array) -> None:
        self.state.touched.append((slots, indices))


def resident_state(config: SchedulerConfig) -> ResidentState:
    slots = config.max_num_seqs
    width = config.blocks_for(config.max_model_len)

    def column() -> Int32Array:
        return np.zeros(slots, dtype=np.int32)

    return ResidentState(
        owner=np.full(slots, -1, dtype=np.int32),
        blocks=np.zeros((slots, width), dtype=np.int32),
        held=column(),
        goal=column(),
        limit=column(),
        owed=column(),
        empty_slots=list(range(config.seats - 1, -1, -1)),
    )
