"""Snapshots of running states, kept where a prompt ends and at multiples of the group's block size.

A state block is written over by every forward. So where a forward ends at a position worth keeping,
the owner goes on in a new block, into which the next plan copies the state, and leaves the old one to
be found (SP-36). That takes a spare block; without one nothing is kept.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.plane.messages import Finish, IndexArray, Int32Array
from tokenspeed.plane.plan import int32
from tokenspeed.scheduler.groups import Group
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.prefix import PrefixCache
from tokenspeed.scheduler.residents import Residents

NO_POSITION = -1


class KeptStates(Protocol):
    def align(self, start: int, end: int) -> int:
        """Where a chunk that could go from `start` to `end` should end, so that its state can be kept."""
        ...

    def planned(self, slot: int, end: int, *, prompt_ends: bool) -> None:
        """A chunk that ends at `end` is planned."""
        ...

    def before_forward(self, slot: int) -> None:
        """A forward of `slot` is about to be planned: it must not write over what is kept."""
        ...

    def landed(self, rows: IndexArray, slots: IndexArray, ends: Int32Array) -> None:
        """Forwards that ended at `ends` have landed. What a row that was cut short has left is not kept."""
        ...

    def vacated(self, slot: int) -> None:
        """The slot's request gives up its pages."""
        ...


@attrs.frozen(eq=False)
class NoStates:
    """No group of the model keeps a running state."""

    def align(self, start: int, end: int) -> int:
        del start
        return end

    def planned(self, slot: int, end: int, *, prompt_ends: bool) -> None:
        return None

    def before_forward(self, slot: int) -> None:
        return None

    def landed(self, rows: IndexArray, slots: IndexArray, ends: Int32Array) -> None:
        return None

    def vacated(self, slot: int) -> None:
        return None


@attrs.define(eq=False)
class KeptState:
    """Writer: StateKeeper.

    Attributes:
        marks: by slot, the position behind which the running block's state is worth keeping.
        left: by (slot, position), blocks that the owner moved off before that forward landed, by group.
    """

    marks: dict[int, int] = attrs.field(factory=dict[int, int])
    left: dict[tuple[int, int], tuple[int, ...]] = attrs.field(factory=dict[tuple[int, int], tuple[int, ...]])


@attrs.frozen(kw_only=True, eq=False)
class StateKeeper:
    """`groups` are the state groups; `paged` the others, whose last page is kept in part with a state."""

    groups: tuple[Group, ...]
    paged: tuple[Group, ...]
    residents: Residents
    pool: Pool
    cache: PrefixCache
    state: KeptState = attrs.field(factory=KeptState)

    @property
    def interval(self) -> int:
        """Positions at multiples of this are worth keeping."""
        return max(group.block_tokens for group in self.groups)

    def align(self, start: int, end: int) -> int:
        aligned = end // self.interval * self.interval
        return aligned if aligned > start else end

    def planned(self, slot: int, end: int, *, prompt_ends: bool) -> None:
        if prompt_ends or not end % self.interval:
            self.state.marks[slot] = end

    def before_forward(self, slot: int) -> None:
        position = self.state.marks.pop(slot, NO_POSITION)
        if position == NO_POSITION:
            return
        tables = self.residents.state.groups
        blocks = [int(tables[group.number].blocks[slot, 0]) for group in self.groups]
        landed = int(self.residents.table.schedule.landed[int(self.residents.state.owner[slot])]) >= position
        if landed and not any(
            self.cache.keeps(group.number, block) for group, block in zip(self.groups, blocks, strict=True)
        ):
            return  # another block was found under the same name
        want = [0] * len(tables)
        for group in self.groups:
            want[group.number] = 1
        if not self.pool.fits(want):
            for group, block in zip(self.groups, blocks, strict=True):
                self.cache.unkeep(group.number, block)
            return
        # Promised first: what one group takes must not be what another was said to get.
        for group in self.groups:
            self.pool.promise(group.number, 1)
        left = tuple(self._move(group, slot) for group in self.groups)
        if landed:
            self._release(left)
        else:
            self.state.left[slot, position] = left

    def landed(self, rows: IndexArray, slots: IndexArray, ends: Int32Array) -> None:
        marks, left = self.state.marks, self.state.left
        if not marks and not left:
            return
        # Its logits may not have been numbers, and then its state is none either.
        cut = self.residents.table.output.finish[rows] == Finish.ABORT
        for row, slot, end, ended in zip(rows.tolist(), slots.tolist(), ends.tolist(), cut.tolist(), strict=True):
            blocks = left.pop((slot, end), None)
            if blocks is not None:
                if not ended:
                    self._keep(row, slot, end, blocks)
                self._release(blocks)
            elif marks.get(slot) == end and not ended:
                tables = self.residents.state.groups
                running = tuple(int(tables[group.number].blocks[slot, 0]) for group in self.groups)
                self._keep(row, slot, end, running)

    def vacated(self, slot: int) -> None:
        self.state.marks.pop(slot, None)
        for key in [key for key in self.state.left if key[0] == slot]:
            self._release(self.state.left.pop(key))

    def _move(self, group: Group, slot: int) -> int:
        self.pool.redeem(group.number, 1)
        return self.residents.move_state(group, slot)

    def _keep(self, row: int, slot: int, position: int, blocks: tuple[int, ...]) -> None:
        """The state, and the page that ends there in part: a hit at `position` needs both."""
        for group, block in zip(self.groups, blocks, strict=True):
            self.cache.keep(group.number, row, block, position)
        for group in self.paged:
            if position % group.block_tokens and group.stride == 1:
                block = int(self.residents.state.groups[group.number].blocks[slot, position // group.block_tokens])
                self.cache.keep(group.number, row, block, position)

    def _release(self, blocks: tuple[int, ...]) -> None:
        for group, block in zip(self.groups, blocks, strict=True):
            self.pool.release(group.number, int32([block]))
