"""Decode rows: one token each a round. The steady state of an engine, so all of it is arrays.

The lanes below are rebuilt when a request joins or leaves; a round without such a change costs a few
array operations, whatever the context lengths.
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.plan import EMPTY_INT32, int32
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.draft import DecodeRows, PlanDraft
from tokenspeed.scheduler.pool import BlockPool
from tokenspeed.scheduler.pressure import Pressure
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.states import Event, Life, State


@attrs.define(eq=False)
class Lanes:
    """Writer: Decoding. Columns of the decoding rows, int32 ``[n]``, in the order they began to decode.

    ``starts`` equals the table's ``scheduled``, ``room`` the tokens a row's pages hold. ``rows``,
    ``slots`` and ``starts`` are handed out in plans: replaced, never written. ``left``: rounds until
    the first row has nothing more to plan. ``epoch``: of `Life` when the lanes were built.
    """

    rows: Int32Array = EMPTY_INT32
    slots: Int32Array = EMPTY_INT32
    starts: Int32Array = EMPTY_INT32
    limit: Int32Array = EMPTY_INT32
    room: Int32Array = EMPTY_INT32
    left: int = 0
    epoch: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Decoding:
    config: SchedulerConfig
    table: RequestTable
    life: Life
    pool: BlockPool
    residents: Residents
    pressure: Pressure
    lanes: Lanes = attrs.field(factory=Lanes)

    def plan(self, draft: PlanDraft) -> None:
        """Plan a token of every decoding row that has a page for it."""
        lanes = self.lanes
        if lanes.epoch != self.life.decoding_epoch:
            self._rebuild()
        if not len(lanes.rows):
            return
        want = lanes.starts + (1 + self.config.overlap_schedule_depth)
        np.minimum(want, lanes.limit, out=want)
        short = (want > lanes.room).nonzero()[0]
        if len(short) > self.pool.spare:
            self.pressure.relieve(lanes.rows[short], draft)
            self._rebuild()
            self._plan_some(lanes.room > lanes.starts, draft)
            return
        if len(short):
            self.residents.extend_each(lanes.slots[short])
            lanes.room[short] += self.config.page_tokens
        draft.decodes = DecodeRows(rows=lanes.rows, slots=lanes.slots, starts=lanes.starts)
        lanes.starts = self._schedule(draft.decodes)
        lanes.left -= 1
        if not lanes.left:
            self._retire_exhausted(lanes.rows[lanes.starts >= lanes.limit])

    def _plan_some(self, chosen: BoolArray, draft: PlanDraft) -> None:
        """Under pressure: the chosen lanes only, bool ``[n]``; the others wait for pages."""
        lanes = self.lanes
        if not chosen.any():
            return
        some = DecodeRows(
            rows=int32(lanes.rows[chosen]), slots=int32(lanes.slots[chosen]), starts=int32(lanes.starts[chosen])
        )
        draft.decodes = some
        ends = self._schedule(some)
        self._retire_exhausted(some.rows[ends >= lanes.limit[chosen]])
        self._rebuild()

    def _schedule(self, decodes: DecodeRows) -> Int32Array:
        ends: Int32Array = decodes.starts + np.int32(1)
        ends.setflags(write=False)
        self.table.schedule.scheduled[decodes.rows] = ends
        self.table.schedule.inflight[decodes.rows] += 1
        return ends

    def _retire_exhausted(self, rows: Int32Array) -> None:
        """Nothing is left to plan for these: their last token needs no KV."""
        for row in rows.tolist():
            self.life.move(row, Event.LAST_PLANNED)

    def _rebuild(self) -> None:
        lanes, residents = self.lanes, self.residents.state
        rows = int32(self.life.rows(State.DECODING))
        slots = int32(self.table.schedule.slot[rows])
        lanes.rows, lanes.slots = rows, slots
        lanes.starts = int32(self.table.schedule.scheduled[rows])
        lanes.limit = residents.limit[slots]
        lanes.room = residents.held[slots] * np.int32(self.config.page_tokens)
        lanes.left = int((lanes.limit - lanes.starts).min(initial=np.iinfo(np.int32).max))
        lanes.epoch = self.life.decoding_epoch
