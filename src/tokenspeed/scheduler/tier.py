"""The seam to the tier below the device: what the parts that plan device blocks tell and ask it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import attrs

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import CacheOp
from tokenspeed.plane.results import CacheAcks
from tokenspeed.scheduler.host.operations import Work

log = logging.getLogger(__name__)


class Tier(Protocol):
    """Host-tier blocks, and the operations of the plan under construction. Null: `NoTier`."""

    @property
    def open(self) -> int:
        """Operations without acknowledgment."""
        ...

    def find(self, group: int, name: bytes) -> int | None:
        """The host block of a complete prefix whose bytes are there."""
        ...

    def evicting(self, group: int, block: int, name: bytes) -> None:
        """A findable device block is being taken by this plan. Its bytes may still be stored, stream-ordered."""
        ...

    def forgotten(self, group: int, block: int) -> None:
        """A device block that was published is not findable any more, and may be written over at once."""
        ...

    def published(self, group: int, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Device blocks became findable."""
        ...

    def load(self, group: int, host_blocks: Int32Array, device_blocks: Int32Array) -> None:
        """This plan loads these; the host blocks stay until the acknowledgment."""
        ...

    def take_ops(self) -> tuple[CacheOp, ...]:
        """The operations of the plan under construction; asked once, at its end, in frozen rounds too."""
        ...

    def acked(self, acks: CacheAcks) -> Sequence[Work]:
        """Operations have completed; unknown and repeated ones are ignored (SP-16). Returns what they did."""
        ...

    def holds_alone(self) -> bool:
        """Whether acknowledgments will set free device blocks that nobody else uses."""
        ...

    def clear(self) -> None:
        """Forget everything findable."""
        ...


@attrs.frozen(eq=False)
class NoTier:
    """The device is the only tier."""

    open: int = 0

    def find(self, group: int, name: bytes) -> int | None:
        del group, name
        return None

    def evicting(self, group: int, block: int, name: bytes) -> None:
        return None

    def forgotten(self, group: int, block: int) -> None:
        return None

    def published(self, group: int, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        return None

    def load(self, group: int, host_blocks: Int32Array, device_blocks: Int32Array) -> None:
        raise AssertionError("a load without a host tier")

    def take_ops(self) -> tuple[CacheOp, ...]:
        return ()

    def acked(self, acks: CacheAcks) -> Sequence[Work]:
        log.debug("acknowledgments of unknown operations: %s", acks)
        return ()

    def holds_alone(self) -> bool:
        return False

    def clear(self) -> None:
        return None
