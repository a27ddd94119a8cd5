"""Storage (L3) transactions as the scheduler sees them; the executor that does the I/O is told by the plan.

Before a prompt is admitted, what the nearer tiers lack of it is looked up and fetched into the host tier
(`storage_fetch`); what reached the host tier is stored afterwards (`storage_keep`). A failure, a miss or
want of room shortens the hit and nothing else (B-35): no plan waits for a fetch that could miss (SP-33).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from tokenspeed.plane.plan import StorageOp
from tokenspeed.plane.results import StorageTick
from tokenspeed.scheduler.host.operations import Store, Work


class Shelf(Protocol):
    """Host-tier blocks, for storage to fill and to read. A block reserved or kept stays until it is let go."""

    def find(self, group: int, name: bytes) -> int | None:
        """The block whose bytes are there."""
        ...

    def holds(self, group: int, name: bytes) -> int | None:
        """The block that has these bytes or is getting them."""
        ...

    def name(self, group: int, block: int) -> bytes | None: ...

    def fits(self, want: Sequence[int]) -> bool:
        """Whether ``want[g]`` blocks of every group g could be reserved."""
        ...

    def reserve(self, wanted: Sequence[tuple[int, Sequence[bytes]]]) -> tuple[int, ...]:
        """Blocks for the names of each group, which fit and are not held yet; they are held from now on."""
        ...

    def wrote(self, group: int, block: int) -> None:
        """The bytes of a reserved block are there: it can be found."""
        ...

    def void(self, group: int, block: int) -> None:
        """A reserved block did not get its bytes: it holds nothing."""
        ...

    def keep(self, group: int, name: bytes) -> int | None:
        """The block whose bytes are there, which is not evicted from now on; None: it has gone."""
        ...

    def let_go(self, group: int, blocks: Sequence[int]) -> None:
        """One `reserve` or `keep` less on each of `blocks`, which are in the order of a prefix."""
        ...


class Storage(Protocol):
    """What the scheduler's parts tell and ask storage. Null: `NoStorage`."""

    @property
    def busy(self) -> bool:
        """Whether host blocks are in the executor's hands: the caches cannot be cleared."""
        ...

    def takes(self, row: int, *, most: int) -> bool:
        """A request is submitted. True: storage prepares it and puts it in the waiting queue later.

        Args:
            most: tokens of its prompt that a hit may cover.
        """
        ...

    def abort(self, row: int) -> None:
        """A request that is being prepared has ended; takes effect at the next head (SP-55)."""
        ...

    def admitted(self, row: int) -> None:
        """`row` waits no longer: what was fetched for it may be evicted, unless its load holds it."""
        ...

    def acked(self, works: Sequence[Work]) -> None:
        """What reached the host tier may be stored, behind its acknowledgment (CT-17)."""
        ...

    def advance(self, tick: StorageTick, *, round_id: int) -> None:
        """The head: what completed, and what this round permits."""
        ...

    def plan(self, *, round_id: int) -> tuple[StorageOp, ...]:
        """This plan's storage entries; asked before admissions, in frozen rounds too, where it gives CANCELs only."""
        ...

    def clear(self) -> None:
        """The nearer tiers are being forgotten; only while not `busy`."""
        ...

    def pins(self) -> tuple[tuple[int, int], ...]:
        """(group, host block), once for each `reserve` or `keep`; for diagnostics."""
        ...


@attrs.frozen(eq=False)
class NoStorage:
    """No backend: every request waits at once and nothing is planned (CT-18)."""

    busy: bool = False

    def takes(self, row: int, *, most: int) -> bool:
        del row, most
        return False

    def abort(self, row: int) -> None:
        return None

    def admitted(self, row: int) -> None:
        return None

    def acked(self, works: Sequence[Work]) -> None:
        return None

    def advance(self, tick: StorageTick, *, round_id: int) -> None:
        return None

    def plan(self, *, round_id: int) -> tuple[StorageOp, ...]:
        del round_id
        return ()

    def clear(self) -> None:
        return None

    def pins(self) -> tuple[tuple[int, int], ...]:
        return ()


@attrs.define(eq=False)
class StoragePermit:
    """Writer: Transactions. What the latest tick said."""

    allowed: bool = False
    now_s: float = 0.0
    pressure: float = 0.0


class Fetching(Protocol):
    """The half of `Transactions` that reads; see `storage_fetch.Fetch`."""

    @property
    def busy(self) -> bool: ...

    def takes(self, row: int, *, most: int) -> bool: ...

    def abort(self, row: int) -> None: ...

    def admitted(self, row: int) -> None: ...

    def settle_aborts(self) -> None:
        """Requests that ended since the last head."""
        ...

    def ended(self, op_id: int, outcomes: tuple[bool, ...], *, round_id: int) -> bool:
        """An operation ended; of one that was given up `outcomes` are (). False: it is none of this half's."""
        ...

    def expire(self, *, now_s: float, round_id: int) -> None:
        """Requests that have been prepared for too long go on without."""
        ...

    def plan(self, *, allowed: bool, now_s: float, round_id: int) -> list[StorageOp]: ...

    def clear(self) -> None: ...

    def pins(self) -> list[tuple[int, int]]: ...


class Keeping(Protocol):
    """The half of `Transactions` that writes; see `storage_keep.Keep`."""

    @property
    def busy(self) -> bool: ...

    def offer(self, group: int, host_blocks: Sequence[int]) -> None:
        """These were written."""
        ...

    def ended(self, op_id: int) -> bool: ...

    def plan(self, *, pressure: float) -> list[StorageOp]: ...

    def clear(self) -> None: ...

    def pins(self) -> list[tuple[int, int]]: ...


@attrs.frozen(kw_only=True, eq=False)
class Transactions:
    """Meets `Storage`."""

    fetch: Fetching
    keep: Keeping
    permit: StoragePermit = attrs.field(factory=StoragePermit)

    @property
    def busy(self) -> bool:
        return self.fetch.busy or self.keep.busy

    def takes(self, row: int, *, most: int) -> bool:
        return self.fetch.takes(row, most=most)

    def abort(self, row: int) -> None:
        self.fetch.abort(row)

    def admitted(self, row: int) -> None:
        self.fetch.admitted(row)

    def acked(self, works: Sequence[Work]) -> None:
        for work in works:
            if isinstance(work, Store):
                self.keep.offer(work.group, work.host_blocks.tolist())

    def advance(self, tick: StorageTick, *, round_id: int) -> None:
        permit = self.permit
        permit.allowed, permit.pressure, permit.now_s = tick.storage, tick.pressure, tick.now_s
        self.fetch.settle_aborts()
        for done in tick.completed:
            self._ended(done.op_id, done.outcomes, round_id=round_id)
        for op_id in tick.cancelled:
            self._ended(op_id, (), round_id=round_id)
        self.fetch.expire(now_s=tick.now_s, round_id=round_id)

    def plan(self, *, round_id: int) -> tuple[StorageOp, ...]:
        permit = self.permit
        ops = self.fetch.plan(allowed=permit.allowed, now_s=permit.now_s, round_id=round_id)
        if permit.allowed:
            ops += self.keep.plan(pressure=permit.pressure)
        return tuple(ops)

    def clear(self) -> None:
        self.fetch.clear()
        self.keep.clear()

    def pins(self) -> tuple[tuple[int, int], ...]:
        return (*self.fetch.pins(), *self.keep.pins())

    def _ended(self, op_id: int, outcomes: tuple[bool, ...], *, round_id: int) -> None:
        """A completion that comes twice is ignored (SP-16)."""
        if not self.keep.ended(op_id):
            self.fetch.ended(op_id, outcomes, round_id=round_id)


@attrs.define(eq=False)
class OpIds:
    """Numbers storage operations; shared by the two halves of `Transactions`."""

    last: int = 0

    def next(self) -> int:
        self.last += 1
        return self.last


Known = Callable[[int, bytes], bool]
"""Whether the device has a block of (group, name)."""
