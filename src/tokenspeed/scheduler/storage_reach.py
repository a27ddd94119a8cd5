"""Which blocks of a prompt to look for in storage (L3), and which of those found are worth fetching.

A prefix is usable up to a position at which every cache group has what it needs: a full group all blocks
before it, a window group those that the next query sees, a state group the state kept there. Only
positions that end a block of every group count, since what storage gives is whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import attrs

from tokenspeed.scheduler.groups import Group, Kind

Holds: TypeAlias = Callable[[int, bytes], bool]
"""Whether a block of (group, name) is there."""


class StoredBlock(NamedTuple):
    """A block that holds a complete piece of a prefix: `name` is that of the prefix. A prompt may have thousands."""

    group: int
    name: bytes

    @property
    def key(self) -> bytes:
        """Its key in storage. Names do not tell groups apart."""
        return self.group.to_bytes(2, "little") + self.name


@attrs.frozen(kw_only=True, eq=False)
class StorageReach:
    page_tokens: int
    groups: tuple[Group, ...]

    @property
    def step(self) -> int:
        """Pages between two positions at which a prefix may end."""
        return math.lcm(*(group.stride for group in self.groups))

    def lacking(self, chain: Sequence[bytes], pages: int, holds: Holds) -> list[StoredBlock]:
        """Blocks that could make the known prefix longer, by group and position.

        Args:
            chain: ``chain[i]`` names the first `i` pages; at least `pages` beyond the root.
            pages: the prefix may reach so far.
            holds: of the tiers nearer than storage.
        """
        known = self.reach(chain, pages, holds)
        if known + self.step > pages:
            return []
        found: list[StoredBlock] = []
        for group in self.groups:
            first, number = self._first(group, known + self.step), group.number
            names = chain[first : pages - pages % self.step + 1 : group.stride]
            found.extend(StoredBlock(number, name) for name in names if not holds(number, name))
        return found

    def chosen(
        self, chain: Sequence[bytes], pages: int, holds: Holds, stored: frozenset[StoredBlock]
    ) -> list[StoredBlock]:
        """Of the `stored` blocks those that the longest prefix needs; none if it is not longer than the known one."""
        known = self.reach(chain, pages, holds)
        longest = self.reach(chain, pages, lambda group, name: (group, name) in stored or holds(group, name))
        if longest <= known:
            return []
        return [
            StoredBlock(group.number, name)
            for group in self.groups
            for name in self._needed(group, longest, chain)
            if not holds(group.number, name)
        ]

    def reach(self, chain: Sequence[bytes], pages: int, has: Holds) -> int:
        """Pages of the longest prefix of at most `pages` of which every group has what it needs."""
        step = self.step
        limit = pages
        for group in self.groups:
            if group.kind is Kind.FULL:
                limit = min(limit, self._run(group, limit, has, chain))
        limit -= limit % step
        if all(group.kind is Kind.FULL for group in self.groups):
            return limit
        runs = {
            group.number: self._runs(group, limit, has, chain) for group in self.groups if group.kind is Kind.WINDOW
        }
        for end in range(limit, 0, -step):
            if all(self._ends_at(group, end, runs, has, chain) for group in self.groups):
                return end
        return 0

    def _ends_at(self, group: Group, end: int, runs: dict[int, list[int]], has: Holds, chain: Sequence[bytes]) -> bool:
        if group.kind is Kind.FULL:
            return True
        if group.kind is Kind.STATE:
            return has(group.number, chain[end])
        at = end // group.stride
        return runs[group.number][at] >= at - group.first_seen(end * self.page_tokens)

    def _run(self, group: Group, limit: int, has: Holds, chain: Sequence[bytes]) -> int:
        """Pages of the blocks that follow each other from the start."""
        end = group.stride
        while end <= limit and has(group.number, chain[end]):
            end += group.stride
        return end - group.stride

    def _runs(self, group: Group, limit: int, has: Holds, chain: Sequence[bytes]) -> list[int]:
        """For each count of blocks: how many in a row are there just before it."""
        runs = [0]
        for end in range(group.stride, limit + 1, group.stride):
            runs.append(runs[-1] + 1 if has(group.number, chain[end]) else 0)
        return runs

    def _first(self, group: Group, end: int) -> int:
        """End of the first block that a prefix of `end` pages or more may need."""
        if group.kind is Kind.STATE:
            return end
        return (group.first_seen(end * self.page_tokens) + 1) * group.stride

    def _needed(self, group: Group, end: int, chain: Sequence[bytes]) -> Iterator[bytes]:
        for at in range(self._first(group, end), end + 1, group.stride):
            yield chain[at]
