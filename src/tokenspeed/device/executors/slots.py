"""Host-side state of the device slots: block tables, owners, and which slots have a sampled token.

Belongs to the forward thread, which changes it in queue order and gives each forward copies, so that
a forward in flight never sees a later change (DP-51).
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.plan import BlockGrants, Seat
from tokenspeed.plane.table import Int64Array

NOBODY = -1


@attrs.define(eq=False)
class SlotState:
    """Writer: the executor, on ``ts-forward``. Build it with `slot_state`.

    Attributes:
        tables: int32 ``[slots, max_blocks]``; pages of the slot's request in order, 0 where none.
        owners: int32 ``[slots]``; the request-table row that sits there, or NOBODY.
        sampled: bool ``[slots]``; a forward queued before samples a token for the slot, so that
            FROM_DEVICE has something to refer to.
        adopted: bool ``[slots]``; an image brings the sampled token of whoever is seated there next.
        num_pages: pages are in ``[1, num_pages)``; 0 is the null page.
    """

    tables: Int32Array
    owners: Int32Array
    sampled: BoolArray
    adopted: BoolArray
    num_pages: int
    page_tokens: int

    def seat(self, seat: Seat) -> None:
        """A new owner: the slot's blocks are whatever is granted from here on."""
        if not 0 <= seat.slot < len(self.owners):
            raise InvariantBroken("a seat outside the slots", slot=seat.slot, slots=len(self.owners))
        self.owners[seat.slot] = seat.row
        self.tables[seat.slot] = 0
        self.sampled[seat.slot] = self.adopted[seat.slot]
        self.adopted[seat.slot] = False

    def adopt(self, slot: int) -> None:
        """A restored request's token arrives in `slot`, in which its seat may or may not be yet."""
        self.sampled[slot] = self.adopted[slot] = True

    def grant(self, grants: BlockGrants) -> None:
        """Write granted blocks into the tables."""
        if grants.group:
            raise InvariantBroken("a grant in a cache group that the model does not have", group=grants.group)
        blocks = grants.blocks
        if len(blocks) and not 0 < blocks.min() <= blocks.max() < self.num_pages:
            raise InvariantBroken("a grant outside the pool", blocks=blocks, pages=self.num_pages)
        self.tables[grants.slots, grants.indices] = blocks

    def gather(self, rows: Int32Array, slots: Int32Array, contexts: Int64Array) -> Int32Array:
        """Block tables of a batch: int32 ``[n, blocks of the longest row]``, 0 behind each context.

        Raises: InvariantBroken: a row is not the owner of its slot, or lacks a block of its context.
        """
        if (self.owners[slots] != rows).any():
            raise InvariantBroken("a row in a slot it does not own", rows=rows, slots=slots, owners=self.owners[slots])
        needed = -(-contexts // self.page_tokens)
        width = int(needed.max())
        if width > self.tables.shape[1]:
            raise InvariantBroken("a context longer than a block table", tokens=contexts.max(), blocks=width)
        tables = self.tables[slots, :width]
        tables[np.arange(width) >= needed[:, None]] = 0
        if np.count_nonzero(tables) != needed.sum():
            short = np.flatnonzero(np.count_nonzero(tables, axis=1) != needed)
            raise InvariantBroken("rows without blocks for their context", slots=slots[short], contexts=contexts[short])
        return tables

    def vacate(self, row: int, slot: int) -> bool:
        """The slot's request has ended; False if another has been seated there since, or none was."""
        if slot < 0 or self.owners[slot] != row:
            return False
        self.owners[slot] = NOBODY
        self.sampled[slot] = self.adopted[slot] = False
        return True


def slot_state(*, slots: int, max_model_len: int, num_pages: int, page_tokens: int) -> SlotState:
    """Empty slots for requests of at most `max_model_len` tokens."""
    max_blocks = -(-max_model_len // page_tokens)
    return SlotState(
        tables=np.zeros((slots, max_blocks), dtype=np.int32),
        owners=np.full(slots, NOBODY, dtype=np.int32),
        sampled=np.zeros(slots, dtype=np.bool_),
        adopted=np.zeros(slots, dtype=np.bool_),
        num_pages=num_pages,
        page_tokens=page_tokens,
    )
