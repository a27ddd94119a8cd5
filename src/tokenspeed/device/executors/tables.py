"""The block tables of one cache group by slot, and what a batch needs of them; ``ts-forward`` only."""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np

from tokenspeed.device.kv.layout import STATE
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import BlockGrants
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import Int64Array


class BlockTable(Protocol):
    """`entries`: int32 ``[slots, max_blocks]``, 0 where the slot's request was granted nothing."""

    @property
    def entries(self) -> Int32Array: ...

    def grant(self, grants: BlockGrants) -> None:
        """Raises: InvariantBroken: a block outside the pool, or of the null parent."""
        ...

    def gather(self, slots: Int64Array, starts: Int64Array, contexts: Int64Array) -> Int32Array:
        """int32 ``[n, blocks of the longest row]``; `starts` and `contexts` as in a `ForwardBatch`.

        Raises: InvariantBroken: a row lacks a block that one of its queries reads or writes.
        """
        ...


@attrs.define(eq=False)
class Granted:
    """A table's entries and the blocks there are. Writer: the slots, on ``ts-forward``.

    Attributes:
        first, end: blocks are in ``[first, end)``; those before are the null parent's.
    """

    entries: Int32Array
    first: int
    end: int

    def write(self, grants: BlockGrants) -> None:
        blocks = grants.blocks
        if len(blocks) and not self.first <= blocks.min() <= blocks.max() < self.end:
            raise InvariantBroken("a grant outside the pool", group=grants.group, blocks=blocks, end=self.end)
        self.entries[grants.slots, grants.indices] = blocks


@attrs.frozen(kw_only=True, eq=False)
class AttentionTable:
    """Of a full or window group.

    Attributes:
        window_tokens: what a query sees, itself included; 0: everything.
    """

    granted: Granted
    block_tokens: int
    window_tokens: int

    @property
    def entries(self) -> Int32Array:
        return self.granted.entries

    def grant(self, grants: BlockGrants) -> None:
        self.granted.write(grants)

    def gather(self, slots: Int64Array, starts: Int64Array, contexts: Int64Array) -> Int32Array:
        entries, needed = self.entries, -(-contexts // self.block_tokens)
        width = int(needed.max())
        if width > entries.shape[1]:
            raise InvariantBroken("a context longer than a block table", tokens=contexts.max(), blocks=width)
        tables = entries[slots, :width]
        columns = np.arange(width)
        tables[columns >= needed[:, None]] = 0
        if self.window_tokens:
            # What lies behind the window may belong to somebody else by now.
            behind = np.maximum(starts + 1 - self.window_tokens, 0) // self.block_tokens
            tables[columns < behind[:, None]] = 0
            needed = needed - behind
        if np.count_nonzero(tables) != needed.sum():
            short = np.flatnonzero(np.count_nonzero(tables, axis=1) != needed)
            raise InvariantBroken("rows without blocks for their context", slots=slots[short], contexts=contexts[short])
        return tables


@attrs.frozen(kw_only=True, eq=False)
class StateTable:
    """Of a state group: one column, the block that a forward reads and writes over."""

    granted: Granted

    @property
    def entries(self) -> Int32Array:
        return self.granted.entries

    def grant(self, grants: BlockGrants) -> None:
        self.granted.write(grants)

    def gather(self, slots: Int64Array, starts: Int64Array, contexts: Int64Array) -> Int32Array:
        tables = self.entries[slots]
        if not tables.all():
            raise InvariantBroken("rows without a state", slots=slots[tables[:, 0] == 0])
        return tables


def block_table(group: CacheGroupSpec, *, slots: int, max_len: int, num_parents: int) -> BlockTable:
    """An empty table for requests of at most `max_len` tokens."""
    state, count = group.kind == STATE, group.blocks_per_parent
    columns = 1 if state else -(-max_len // group.block_tokens)
    entries = np.zeros((slots, columns), dtype=np.int32)
    granted = Granted(entries=entries, first=count, end=count * num_parents)
    if state:
        return StateTable(granted=granted)
    return AttentionTable(granted=granted, block_tokens=group.block_tokens, window_tokens=group.window_tokens)
