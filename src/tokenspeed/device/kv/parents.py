"""How blocks of different sizes share one pool: equal parents, each cut into the blocks of one group.

A parent's size is a common multiple of the groups' padded block sizes, hence LCM parent. Parents that
hold few blocks keep the space small that a request's last, half-used parents take, so the smallest
one is chosen whose waste is bearable.
"""

from __future__ import annotations

import itertools
import math

import attrs

from tokenspeed.errors import SettingsError

MOST_BLOCKS = 16
"""Of one group in a parent."""

MOST_WASTE = 0.1
"""Share of a parent that may be padding, whichever group's blocks it holds."""


@attrs.frozen(kw_only=True)
class BlockSize:
    """What one block of a cache group needs.

    Attributes:
        multiple_of: bytes; the padded size, and so every block's address, is a multiple of it.
    """

    name: str
    nbytes: int
    multiple_of: int = 1


@attrs.frozen(kw_only=True)
class Parents:
    """The decision; tuples are in the order of the sizes given.

    Attributes:
        block_bytes: padded: ``parent_bytes / blocks_per_parent``.
    """

    parent_bytes: int
    blocks_per_parent: tuple[int, ...]

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(self.parent_bytes // count for count in self.blocks_per_parent)

    def waste(self, sizes: tuple[BlockSize, ...]) -> float:
        """The largest share of a parent that is padding."""
        pairs = zip(sizes, self.blocks_per_parent, strict=True)
        return max(1.0 - size.nbytes * count / self.parent_bytes for size, count in pairs)


def form_parents(sizes: tuple[BlockSize, ...]) -> Parents:
    """The smallest parent that holds at most `MOST_BLOCKS` blocks of a group and wastes at most `MOST_WASTE`.

    With one group a parent is a block.

    Raises: SettingsError: there is none; the text has the sizes and the least waste there could be.
    """
    if len(sizes) == 1:
        return _fitted(sizes, (1,))
    ways = [_fitted(sizes, counts) for counts in itertools.product(range(1, MOST_BLOCKS + 1), repeat=len(sizes))]
    good = [way for way in ways if way.waste(sizes) <= MOST_WASTE]
    if good:
        return min(good, key=lambda way: (way.parent_bytes, way.blocks_per_parent))
    least = min(ways, key=lambda way: (way.waste(sizes), way.parent_bytes))
    shown = ", ".join(f"{size.name} {size.nbytes:,} bytes" for size in sizes)
    counts = ", ".join(f"{count} x {size.name}" for count, size in zip(least.blocks_per_parent, sizes, strict=True))
    raise SettingsError(
        f"cache.page_tokens: blocks of this model's cache groups ({shown}) do not fit one pool: a parent of at most "
        f"{MOST_BLOCKS} blocks wastes at least {least.waste(sizes):.0%} ({least.parent_bytes:,} bytes: {counts}), and "
        f"{MOST_WASTE:.0%} is allowed. Change cache.page_tokens"
    )


def _fitted(sizes: tuple[BlockSize, ...], counts: tuple[int, ...]) -> Parents:
    """The smallest parent that ``counts[i]`` blocks of each group i fit into, every block at a multiple as asked."""
    pairs = tuple(zip(sizes, counts, strict=True))
    step = math.lcm(*(count * size.multiple_of for size, count in pairs))
    needed = max(count * size.nbytes for size, count in pairs)
    return Parents(parent_bytes=-(-needed // step) * step, blocks_per_parent=counts)
