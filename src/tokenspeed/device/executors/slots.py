"""Host-side state of the device slots: block tables, owners, and which slots have a sampled token.

Belongs to the forward thread, which changes it in queue order and gives each forward copies, so that
a forward in flight never sees a later change (DP-51).
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.device.executors.tables import BlockTable, block_table
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.plan import BlockGrants, Seat
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import Int64Array

NOBODY = -1


@attrs.define(eq=False)
class SlotState:
    """Writer: the executor, on ``ts-forward``. Build it with `slot_state`.

    Attributes:
        tables: the slots' blocks in each cache group, by number.
        owners: int32 ``[slots]``; the request-table row that sits there, or NOBODY.
        sampled: bool ``[slots]``; a forward queued before samples a token for the slot, so that
            FROM_DEVICE has something to refer to.
        adopted: bool ``[slots]``; an image brings the sampled token of whoever is seated there next.
    """

    tables: tuple[BlockTable, ...]
    owners: Int32Array
    sampled: BoolArray
    adopted: BoolArray

    def seat(self, seat: Seat) -> None:
        """A new owner: the slot's blocks are whatever is granted from here on."""
        if not 0 <= seat.slot < len(self.owners):
            raise InvariantBroken("a seat outside the slots", slot=seat.slot, slots=len(self.owners))
        self.owners[seat.slot] = seat.row
        for table in self.tables:
            table.entries[seat.slot] = 0
        self.sampled[seat.slot] = self.adopted[seat.slot]
        self.adopted[seat.slot] = False

    def adopt(self, slot: int) -> None:
        """A restored request's token arrives in `slot`, in which its seat may or may not be yet."""
        self.sampled[slot] = self.adopted[slot] = True

    def grant(self, grants: BlockGrants) -> None:
        """Write granted blocks into the tables. Raises: InvariantBroken: no such group, or blocks outside the pool."""
        if not 0 <= grants.group < len(self.tables):
            raise InvariantBroken("a grant in a cache group that the model does not have", group=grants.group)
        self.tables[grants.group].grant(grants)

    def gather(
        self, rows: Int64Array, slots: Int64Array, starts: Int64Array, contexts: Int64Array
    ) -> tuple[Int32Array, ...]:
        """Block tables of a batch in each group, as `device.step.RaggedRows` says.

        Raises: InvariantBroken: a row is not the owner of its slot, or lacks a block that it needs.
        """
        if (self.owners[slots] != rows).any():
            raise InvariantBroken("a row in a slot it does not own", rows=rows, slots=slots, owners=self.owners[slots])
        return tuple(table.gather(slots, starts, contexts) for table in self.tables)

    def vacate(self, row: int, slot: int) -> bool:
        """The slot's request has ended; False if another has been seated there since, or none was."""
        if slot < 0 or self.owners[slot] != row:
            return False
        self.owners[slot] = NOBODY
        self.sampled[slot] = self.adopted[slot] = False
        return True


def slot_state(*, slots: int, max_model_len: int, num_pages: int, groups: tuple[CacheGroupSpec, ...]) -> SlotState:
    """Empty slots for requests of at most `max_model_len` tokens; `num_pages` parents, the null parent included."""
    return SlotState(
        tables=tuple(block_table(group, slots=slots, max_len=max_model_len, num_parents=num_pages) for group in groups),
        owners=np.full(slots, NOBODY, dtype=np.int32),
        sampled=np.zeros(slots, dtype=np.bool_),
        adopted=np.zeros(slots, dtype=np.bool_),
    )
