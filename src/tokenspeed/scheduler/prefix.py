"""The prefix cache over all cache groups: what is found, and when it becomes findable.

A hit may end inside a block: its boundary block is then copied, since its owner goes on writing it.
A state can be found only where a snapshot of it was kept, so with state groups a hit ends there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import attrs

from tokenspeed.plane.messages import IndexArray, Int32Array
from tokenspeed.plane.results import KvEvent
from tokenspeed.scheduler.hits import Hit
from tokenspeed.scheduler.pool import Pool


@attrs.frozen
class Relink:
    """Block `index` of `slot` is already known to the index as `block`: refer to that one instead."""

    group: int
    slot: int
    index: int
    block: int


class Landed(NamedTuple):
    """Rows of a forward that landed; a tuple, since each round makes one.

    Attributes:
        ends: int32 ``[n]``, tokens of each row whose KV is on the device now.
        tables: by group, int32 ``[slots, blocks]``.
        by_one: each row computed one token.
        some_ended: a row of them may have ended, with this result or before.
    """

    rows: IndexArray
    slots: IndexArray
    ends: Int32Array
    tables: tuple[Int32Array, ...]
    by_one: bool
    some_ended: bool


class PrefixCache(Protocol):
    """Between the scheduler and the pool: blocks are taken through here, since taking may evict."""

    def claim(self, group: int, count: int) -> Int32Array:
        """Take `count` blocks from the pool, forgetting what the evicted ones held."""
        ...

    def match(self, row: int, *, most: int) -> Hit:
        """The longest known prefix of the row's tokens, at most `most` tokens. Takes no references."""
        ...

    def named(self, row: int, *, most: int) -> bool:
        """Prepare a `match` of a long prompt in slices; False: not yet through."""
        ...

    def cached_tokens(self, row: int) -> int:
        """About what `match` would find for a waiting request; for policies."""
        ...

    def grew(self, row: int, *, tokens: int) -> bool:
        """Whether `match` may now find more than the `tokens` it found last."""
        ...

    def seat(self, row: int, slot: int, hit: Hit) -> None:
        """`row` now computes its tokens in `slot`, behind what was found on the device."""
        ...

    def skip(self, group: int, slot: int, blocks: int) -> None:
        """The first `blocks` of the slot's table are never filled, and must not be published."""
        ...

    def forget(self, row: int) -> None:
        """`row` has ended."""
        ...

    def publish(self, landed: Landed) -> list[Relink]:
        """Make full blocks findable whose KV has landed.

        Returns: blocks that were published by another request first; the caller relinks before it
            does anything else with the pool.
        """
        ...

    def keep(self, group: int, row: int, block: int, position: int) -> None:
        """Make `block` findable as what the row's first `position` tokens left: a state, or a page in part."""
        ...

    def keeps(self, group: int, block: int) -> bool:
        """Whether `block` is findable."""
        ...

    def unkeep(self, group: int, block: int) -> None:
        """`block`, if findable, is about to be written over."""
        ...

    def clear(self) -> None:
        """Forget all; no block may be active."""
        ...

    def drain(self) -> tuple[KvEvent, ...]: ...

    def contents(self) -> tuple[dict[bytes, int], ...]:
        """A copy: name to block, by group; parts of pages among them."""
        ...

    def names(self, row: int, group: int, *, tokens: int) -> list[bytes]:
        """Names of the row's whole blocks within its first `tokens` tokens."""
        ...

    def block(self, group: int, name: bytes) -> int | None:
        """The device block findable under `name`."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NullPrefixCache:
    """Prefix caching is off: nothing is found and nothing is kept."""

    pool: Pool
    nothing: Hit

    def claim(self, group: int, count: int) -> Int32Array:
        blocks, _ = self.pool.take(group, count)
        return blocks

    def match(self, row: int, *, most: int) -> Hit:
        del row, most
        return self.nothing

    def named(self, row: int, *, most: int) -> bool:
        del row, most
        return True

    def cached_tokens(self, row: int) -> int:
        del row
        return 0

    def grew(self, row: int, *, tokens: int) -> bool:
        del row, tokens
        return False

    def seat(self, row: int, slot: int, hit: Hit) -> None:
        return None

    def skip(self, group: int, slot: int, blocks: int) -> None:
        return None

    def forget(self, row: int) -> None:
        return None

    def publish(self, landed: Landed) -> list[Relink]:
        del landed
        return []

    def keep(self, group: int, row: int, block: int, position: int) -> None:
        return None

    def keeps(self, group: int, block: int) -> bool:
        del group, block
        return False

    def unkeep(self, group: int, block: int) -> None:
        return None

    def clear(self) -> None:
        return None

    def drain(self) -> tuple[KvEvent, ...]:
        return ()

    def contents(self) -> tuple[dict[bytes, int], ...]:
        return tuple({} for _ in self.nothing.groups)

    def block(self, group: int, name: bytes) -> int | None:
        del group, name
        return None

    def names(self, row: int, group: int, *, tokens: int) -> list[bytes]:
        del row, group, tokens
        return []
