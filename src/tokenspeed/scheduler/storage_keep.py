"""After the host tier: what was written back to it is PUT into storage, as far as the executor's queues allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.scheduler.storage import OpIds, Shelf
from tokenspeed.scheduler.storage_reach import StoredBlock

MAX_OFFERED = 4096
"""Blocks that wait for their PUT; of more, the oldest are not stored."""

MAX_OPEN = 256
"""Blocks in the executor's hands with its queues empty; none with its queues full."""

MAX_IN_OP = 64


def _offers() -> deque[StoredBlock]:
    return deque(maxlen=MAX_OFFERED)


@attrs.define(eq=False)
class KeepState:
    """Writer: Keep. ``open``: (group, host block) of each PUT; ``count``: of all of them."""

    offered: deque[StoredBlock] = attrs.field(factory=_offers)
    open: dict[int, tuple[tuple[int, int], ...]] = attrs.field(factory=dict[int, tuple[tuple[int, int], ...]])
    count: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Keep:
    """Meets `storage.Keeping`. A block may be evicted until its PUT is planned, and not after until its outcome."""

    shelf: Shelf
    ids: OpIds
    state: KeepState = attrs.field(factory=KeepState)

    @property
    def busy(self) -> bool:
        return bool(self.state.open)

    def offer(self, group: int, host_blocks: Sequence[int]) -> None:
        names = (self.shelf.name(group, block) for block in host_blocks)
        self.state.offered.extend(StoredBlock(group, name) for name in names if name is not None)

    def ended(self, op_id: int) -> bool:
        """Whatever came of it: what could not be stored is not tried again, and is not in anyone's way."""
        blocks = self.state.open.pop(op_id, None)
        if blocks is None:
            return False
        self.state.count -= len(blocks)
        for group, block in blocks:
            self.shelf.let_go(group, (block,))
        return True

    def plan(self, *, pressure: float) -> list[StorageOp]:
        """At most one PUT a plan."""
        state = self.state
        room = min(MAX_IN_OP, int(MAX_OPEN * (1.0 - pressure)) - state.count)
        chosen: dict[StoredBlock, int] = {}
        while state.offered and len(chosen) < room:
            offer = state.offered.popleft()
            if offer not in chosen and (block := self.shelf.keep(offer.group, offer.name)) is not None:
                chosen[offer] = block
        if not chosen:
            return []
        op_id = self.ids.next()
        state.open[op_id] = tuple((offer.group, block) for offer, block in chosen.items())
        state.count += len(chosen)
        return [
            StorageOp(
                op_id=op_id,
                verb=StorageVerb.PUT,
                keys=tuple(offer.key for offer in chosen),
                host_blocks=tuple(chosen.values()),
            )
        ]

    def clear(self) -> None:
        self.state.offered.clear()

    def pins(self) -> list[tuple[int, int]]:
        return [pin for blocks in self.state.open.values() for pin in blocks]
