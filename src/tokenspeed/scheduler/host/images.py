"""Retraction images as the rest of the scheduler sees them; `snapshots` has the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.scheduler.hits import Hit
from tokenspeed.scheduler.host.operations import Work


class Images(Protocol):
    """Null: `NoImages`."""

    @property
    def held(self) -> int:
        """Places of the snapshot pool in use."""
        ...

    def possible(self, row: int) -> bool:
        """Whether `row` could be imaged, as things are, once nothing of it is in flight."""
        ...

    def store(self, row: int) -> bool:
        """Store an image of `row`, which has nothing in flight; False: it cannot be imaged.

        Its blocks and its slot can be given to others as soon as this returns True.
        """
        ...

    def waiting(self) -> int | None:
        """The suspended request that comes back next."""
        ...

    def ready(self, row: int) -> bool:
        """Whether all of the image is there."""
        ...

    def hit(self, row: int, *, device: bool = True) -> Hit:
        """Its named blocks: on the device, if `device` allows that, else in the host tier."""
        ...

    def restore(self, row: int, hit: Hit, *, goal: int, limit: int, cover: int) -> None:
        """Seat `row` with what `hit` found; its image is on its way to the device."""
        ...

    def settled(self, works: Sequence[Work]) -> tuple[int, ...]:
        """These were acknowledged. Returns rows that were restored."""
        ...

    def discard(self, row: int) -> None:
        """`row` needs its image no more."""
        ...


@attrs.frozen(eq=False)
class NoImages:
    """No snapshot pool: nobody can be imaged."""

    held: int = 0

    def possible(self, row: int) -> bool:
        del row
        return False

    def store(self, row: int) -> bool:
        del row
        return False

    def waiting(self) -> int | None:
        return None

    def ready(self, row: int) -> bool:
        raise no_image(row)

    def hit(self, row: int, *, device: bool = True) -> Hit:
        del device
        raise no_image(row)

    def restore(self, row: int, hit: Hit, *, goal: int, limit: int, cover: int) -> None:
        del hit, goal, limit, cover
        raise no_image(row)

    def settled(self, works: Sequence[Work]) -> tuple[int, ...]:
        del works
        return ()

    def discard(self, row: int) -> None:
        raise no_image(row)


def no_image(row: int) -> InvariantBroken:
    return InvariantBroken("a request without an image", row=row)
