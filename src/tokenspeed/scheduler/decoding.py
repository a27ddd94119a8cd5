"""Decode rows: one token each a round. The steady state of an engine, so all of it is arrays.

The lanes below are rebuilt when a request joins or leaves; a round without such a change costs a few
array operations, whatever the context lengths.
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.messages import BoolArray, IndexArray, Int32Array
from tokenspeed.plane.plan import EMPTY_INDEX, EMPTY_INT32, index_array, int32
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.draft import NO_CONSTANTS, Constants, DecodeRows, PlanDraft
from tokenspeed.scheduler.groups import UNBOUNDED, Group
from tokenspeed.scheduler.kept_states import KeptStates
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.pressure import Pressure
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.states import Event, Life, State

# Arrays without dimensions: numpy takes them faster than Python's numbers.
ZERO: Int32Array = np.array(0, dtype=np.int32)
ONE: Int32Array = np.array(1, dtype=np.int32)
NEVER: Int32Array = np.array(UNBOUNDED, dtype=np.int32)


@attrs.define(eq=False)
class Lanes:
    """Writer: Decoding. Columns of the decoding rows ``[n]``, in the order they began to decode.

    ``starts`` equals the table's ``scheduled``; ``wall`` is the start from which on a row lacks a
    block, NEVER if its blocks suffice to its end. ``rows``, ``slots``, ``starts`` and ``common`` are
    handed out in plans: replaced, never written. ``left``: rounds until the first row has nothing more
    to plan. ``free``: rounds in which no row reaches its wall. ``epoch``: of `Life` when the lanes were built.
    """

    rows: IndexArray = EMPTY_INDEX
    slots: IndexArray = EMPTY_INDEX
    starts: Int32Array = EMPTY_INT32
    common: Constants = NO_CONSTANTS
    limit: Int32Array = EMPTY_INT32
    wall: Int32Array = EMPTY_INT32
    left: int = 0
    free: int = 0
    epoch: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Decoding:
    config: SchedulerConfig
    groups: tuple[Group, ...]
    table: RequestTable
    life: Life
    pool: Pool
    residents: Residents
    pressure: Pressure
    states: KeptStates
    common: Constants
    lanes: Lanes = attrs.field(factory=Lanes)
    early: Int32Array = attrs.field(init=False)
    """Without dimensions, as the next two."""
    ahead: Int32Array = attrs.field(init=False)
    block_tokens: tuple[Int32Array, ...] = attrs.field(init=False)
    """By group."""

    @early.default
    def _early(self) -> Int32Array:
        return np.array(self.config.early_tokens, dtype=np.int32)

    @ahead.default
    def _ahead(self) -> Int32Array:
        return np.array(self.config.ahead_tokens, dtype=np.int32)

    @block_tokens.default
    def _block_tokens(self) -> tuple[Int32Array, ...]:
        return tuple(np.array(group.block_tokens, dtype=np.int32) for group in self.groups)

    def plan(self, draft: PlanDraft) -> None:
        """Plan a token of every decoding row that has blocks for it."""
        lanes = self.lanes
        if lanes.epoch != self.life.decoding_epoch:
            self._rebuild()
        if not len(lanes.rows):
            return
        if not lanes.free and not self._extend():
            self._plan_pressed(draft)
            return
        lanes.free -= 1
        draft.decodes = DecodeRows(lanes.rows, lanes.slots, lanes.starts, lanes.common)
        lanes.starts = self._schedule(draft.decodes)
        lanes.left -= 1
        if not lanes.left:
            self._retire_exhausted(lanes.rows[lanes.starts >= lanes.limit])

    def _extend(self) -> bool:
        """Blocks for the rows at their wall, and for those that will be there soon; False if there are not enough.

        Taking a block a little early lets most rounds pass without taking any.
        """
        lanes = self.lanes
        left = lanes.wall - lanes.starts
        short = (left <= ZERO).nonzero()[0]
        if len(short):
            soon = (left < self.early).nonzero()[0]
            if not self._extend_rows(soon, left, self.early) and not self._extend_rows(short, left, ONE):
                return False
        lanes.free = int(np.minimum.reduce(left))
        return True

    def _extend_rows(self, short: IndexArray, left: Int32Array, rounds: Int32Array) -> bool:
        """A block for each of these lanes that lacks one within so many rounds, or for none; updates `left`."""
        lanes = self.lanes
        slots = lanes.slots[short]
        lacking = [self._lack(group, short, slots, rounds) for group in self.groups]
        if not self.pool.fits([len(part) for part in lacking]):
            return False
        self.residents.extend_each(lacking)
        lanes.wall[short] = walls = self._walls(slots, lanes.limit[short])
        left[short] = walls - lanes.starts[short]
        return True

    def _lack(self, group: Group, short: IndexArray, slots: IndexArray, rounds: Int32Array) -> IndexArray:
        """Those of `slots` whose next `rounds` forwards lack a block of `group`."""
        if len(self.groups) == 1:
            return slots
        if not group.by_position:
            return EMPTY_INDEX
        lanes = self.lanes
        tokens: Int32Array = np.minimum(lanes.starts[short] + rounds + self.ahead, lanes.limit[short])
        held = self.residents.state.groups[group.number].held[slots]
        return slots[tokens > held * group.block_tokens]

    def _walls(self, slots: IndexArray, limit: Int32Array) -> Int32Array:
        """The starts from which on these slots lack a block, int32 ``[n]``."""
        walls = None
        for group, size, tables in zip(self.groups, self.block_tokens, self.residents.state.groups, strict=True):
            if group.by_position:
                room: Int32Array = tables.held[slots].astype(np.int32) * size
                walls = room if walls is None else np.minimum(walls, room)
        if walls is None:
            return np.full(len(slots), NEVER, dtype=np.int32)
        # A forward from `start` wants room for start + 1 + ahead tokens, but never for more than `limit`.
        ends = walls - self.ahead
        np.putmask(ends, walls >= limit, NEVER)
        return ends

    def _plan_pressed(self, draft: PlanDraft) -> None:
        """Too few blocks: others give way, and only rows that can go on are planned."""
        lanes = self.lanes
        self.pressure.relieve(lanes.rows[lanes.starts >= lanes.wall], draft)
        self._rebuild()
        room = lanes.wall + np.int32(self.config.ahead_tokens)
        self._plan_some(lanes.starts <= room - np.int32(self.config.speculation_width), draft)

    def _plan_some(self, chosen: BoolArray, draft: PlanDraft) -> None:
        """Under pressure: the chosen lanes only, bool ``[n]``; the others wait for pages."""
        lanes = self.lanes
        if not chosen.any():
            return
        some = DecodeRows(
            index_array(lanes.rows[chosen]),
            index_array(lanes.slots[chosen]),
            int32(lanes.starts[chosen]),
            self.common.first(int(np.count_nonzero(chosen))),
        )
        draft.decodes = some
        ends = self._schedule(some)
        self._retire_exhausted(some.rows[ends >= lanes.limit[chosen]])
        self._rebuild()

    def _schedule(self, decodes: DecodeRows) -> Int32Array:
        ends: Int32Array = decodes.starts + ONE
        ends.setflags(write=False)
        self.table.schedule.scheduled[decodes.rows] = ends
        return ends

    def _retire_exhausted(self, rows: IndexArray) -> None:
        """Nothing is left to plan for these: their last token needs no KV."""
        for row in rows.tolist():
            self.life.move(row, Event.LAST_PLANNED)

    def _rebuild(self) -> None:
        lanes = self.lanes
        rows = index_array(self.life.rows(State.DECODING))
        slots = index_array(self.table.schedule.slot[rows])
        for slot in slots.tolist():
            self.states.before_forward(slot)
        lanes.rows, lanes.slots, lanes.common = rows, slots, self.common.first(len(rows))
        lanes.starts = int32(self.table.schedule.scheduled[rows])
        lanes.limit = self.residents.state.limit[slots]
        lanes.wall = self._walls(slots, lanes.limit)
        lanes.left = int((lanes.limit - lanes.starts).min(initial=UNBOUNDED))
        lanes.free = max(0, int((lanes.wall - lanes.starts).min(initial=UNBOUNDED)))
        lanes.epoch = self.life.decoding_epoch
