"""The host tier's blocks as storage uses them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import int32
from tokenspeed.scheduler.host.blocks import HostBlocks


@attrs.frozen(kw_only=True, eq=False)
class HostShelf:
    """Meets `storage.Shelf`."""

    host: HostBlocks

    def find(self, group: int, name: bytes) -> int | None:
        return self.host.find(group, name)

    def holds(self, group: int, name: bytes) -> int | None:
        return self.host.holds(group, name)

    def name(self, group: int, block: int) -> bytes | None:
        return self.host.lanes[group].name_of.get(block)

    def fits(self, want: Sequence[int]) -> bool:
        return self.host.pool.fits(want)

    def reserve(self, wanted: Sequence[tuple[int, Sequence[bytes]]]) -> tuple[int, ...]:
        # Promised first: what one group takes must not be what another was said to get.
        for group, names in wanted:
            self.host.pool.promise(group, len(names))
        reserved: list[int] = []
        for group, names in wanted:
            self.host.pool.redeem(group, len(names))
            blocks = self.host.reserve(group, names).tolist()
            if len(blocks) != len(names):
                raise InvariantBroken("host blocks that were said to fit", group=group, want=len(names), got=blocks)
            reserved.extend(blocks)
        return tuple(reserved)

    def wrote(self, group: int, block: int) -> None:
        self.host.wrote(group, int32([block]))

    def void(self, group: int, block: int) -> None:
        self.host.void(group, block)

    def keep(self, group: int, name: bytes) -> int | None:
        block = self.host.find(group, name)
        if block is not None:
            self.host.pin(group, int32([block]))
        return block

    def let_go(self, group: int, blocks: Sequence[int]) -> None:
        self.host.unpin(group, int32(blocks))
