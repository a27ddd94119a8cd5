"""How far the known prefix of a request reaches, over all cache groups.

Every group limits the hit: a full group to the blocks that follow each other from the start, a window
group to a position whose window is there, a state group to a position whose state was kept. The
groups are asked in turn until none shortens the hit any more.
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import int32
from tokenspeed.scheduler.groups import Group, Kind
from tokenspeed.scheduler.hits import NOWHERE, GroupHit, Hit
from tokenspeed.scheduler.index import Entry, GroupIndex
from tokenspeed.scheduler.names import FOUND_PER_HASH, NAMED_PER_ROUND, Chains
from tokenspeed.scheduler.tier import Tier

HASHED_AHEAD = 64
"""Pages named beyond the last hit at most, so that a miss does not hash the rest of a long prompt."""


@attrs.frozen(kw_only=True, eq=False)
class Reach:
    """Reads the indexes; changes nothing but the chains' length.

    Attributes:
        least: tokens of a page below which it is not worth a copy.
    """

    page_tokens: int
    groups: tuple[Group, ...]
    chains: Chains
    indexes: tuple[GroupIndex, ...]
    tier: Tier
    nothing: Hit
    least: int
    guide: GroupIndex | None = attrs.field(init=False)
    """Of a full group whose blocks are pages: a page that it knows behind another need not be hashed."""

    @guide.default
    def _guide(self) -> GroupIndex | None:
        fits = (group.number for group in self.groups if group.kind is Kind.FULL and group.stride == 1)
        return next((self.indexes[number] for number in fits), None)

    def match(self, row: int, *, most: int) -> Hit:
        """The longest prefix of at most `most` tokens that every group has."""
        position = most
        while position > 0:
            before = position
            for group in self.groups:
                position = self._reach(row, group, position)
            if position == before or len(self.groups) == 1:
                break
        if position <= 0:
            return self.nothing
        return Hit(tokens=position, groups=tuple(self._found(row, group, position) for group in self.groups))

    def _reach(self, row: int, group: Group, limit: int) -> int:
        if limit <= 0:
            return 0
        if group.kind is Kind.FULL:
            return self._reach_full(row, group, limit)
        if group.kind is Kind.WINDOW:
            return self._reach_window(row, group, limit)
        return self._reach_state(row, group, limit)

    def named(self, row: int, *, most: int) -> bool:
        """Name the next pages of a prompt, as far as they are found; False: a later plan must go on."""
        chain, pages = self.chains.of(row), most // self.page_tokens
        hashes, step = NAMED_PER_ROUND, 1
        while True:
            hashes -= self._follow(row, min(pages, len(chain) - 1 + FOUND_PER_HASH * hashes)) // FOUND_PER_HASH
            have = len(chain) - 1
            if have >= pages or not self._goes_on(row, have):
                return True
            if hashes <= 0:
                return False
            self.chains.upto(row, min(pages, have + min(step, hashes)))
            hashes -= len(chain) - 1 - have
            step = min(2 * step, HASHED_AHEAD)

    def length(self, row: int, *, most: int) -> int:
        """About the tokens that `match` would find, of the pages that have names; a few look-ups, however many."""
        group = self.groups[0]
        if group.kind is not Kind.FULL:
            return self.match(row, most=min(most, (len(self.chains.of(row)) - 1) * self.page_tokens)).tokens
        low, high = 0, min(most // group.block_tokens, (len(self.chains.of(row)) - 1) // group.stride)
        while low < high:
            at = (low + high + 1) // 2
            low, high = (at, high) if self._has(row, group, at - 1) else (low, at - 1)
        return low * group.block_tokens

    def _follow(self, row: int, pages: int) -> int:
        """Name pages up to `pages` as far as the index leads; returns how many."""
        chain, page = self.chains.of(row), self.page_tokens
        first = have = len(chain) - 1
        if self.guide is None or self.chains.table.identity.media[row]:
            return 0
        step = 1
        while have < pages:
            end = min(pages, have + step)
            names = self.guide.following(chain[have], self.chains.tokens(row, have * page, end * page), 4 * page)
            self.chains.known(row, names)
            have += len(names)
            if have < end:
                break
            step *= 8  # few look-ups where nothing is known, and few reads where all is
        return have - first

    def _goes_on(self, row: int, pages: int) -> bool:
        """Whether a hit may reach beyond the first `pages` pages, which have names."""
        full = [group for group in self.groups if group.kind is Kind.FULL]
        return all(pages < group.stride or self._has(row, group, pages // group.stride - 1) for group in full)

    def _reach_full(self, row: int, group: Group, limit: int) -> int:
        entries, stride, find = self.indexes[group.number].state.entries, group.stride, self.tier.find
        chain, whole, step, at = self.chains.of(row), limit // group.block_tokens, 1, 0
        missing = False
        while at < whole and not missing:
            place = (at + 1) * stride
            if place >= len(chain) and not self._follow(row, whole * stride):
                self.chains.upto(row, min(whole * stride, place + step))
                step = min(2 * step, HASHED_AHEAD)
            for name in chain[place : whole * stride + 1 : stride]:
                missing = name not in entries and find(group.number, name) is None
                if missing:
                    break
                at += 1
        return at * group.block_tokens + self._part(row, group, at, limit - at * group.block_tokens)

    def _reach_window(self, row: int, group: Group, limit: int) -> int:
        size = group.block_tokens
        while limit > 0:
            at = limit // size
            position = at * size + self._part(row, group, at, limit - at * size)
            low, missing = group.first_seen(position), at - 1
            while missing >= low and self._has(row, group, missing):
                missing -= 1
            if missing < low:
                return position
            limit = missing * size + size - 1
        return 0

    def _reach_state(self, row: int, group: Group, limit: int) -> int:
        index, page = self.indexes[group.number], self.page_tokens
        pages = limit // page
        chain = self.chains.upto(row, pages)
        for at in range(pages, -1, -1):
            entry = index.extending(chain[at])
            if entry is not None and not self.chains.has_media(row, at):
                length = len(entry[2]) // 4
                position = at * page + length
                if position <= limit and entry[2] == self.chains.tokens(row, at * page, position):
                    return position
            if at and (index.block(chain[at]) is not None or self.tier.find(group.number, chain[at]) is not None):
                return at * page
        return 0

    def _has(self, row: int, group: Group, at: int) -> bool:
        name = self.chains.upto(row, (at + 1) * group.stride)[(at + 1) * group.stride]
        return self.indexes[group.number].block(name) is not None or self.tier.find(group.number, name) is not None

    def _part(self, row: int, group: Group, at: int, room: int) -> int:
        """Tokens of block `at` that a block on the device has in common with the row; 0: not worth a copy."""
        if room < self.least or group.stride != 1:
            return 0
        entry = self.indexes[group.number].extending(self.chains.upto(row, at)[at])
        if entry is None or self.chains.has_media(row, at):
            return 0
        begin = at * group.block_tokens
        mine = self.chains.tokens(row, begin, begin + min(room, group.block_tokens))
        common = _common(entry[2], mine)
        return common if common >= self.least else 0

    def _found(self, row: int, group: Group, position: int) -> GroupHit:
        index = self.indexes[group.number]
        if not group.by_position:
            name = self.chains.behind(row, position)
            block, host = index.block(name), None
            if block is None:
                host = self.tier.find(group.number, name)
            return GroupHit(source=NOWHERE if block is None else block, host_source=NOWHERE if host is None else host)
        first, end = group.first_seen(position), position // group.block_tokens
        chain = self.chains.upto(row, end * group.stride)
        names, entries = chain[(first + 1) * group.stride : end * group.stride + 1 : group.stride], index.state.entries
        found = [entries.get(name, _NO_ENTRY)[0] for name in names]
        device: Int32Array = np.array(found, dtype=np.int32)
        host_blocks = np.full(len(found), NOWHERE, dtype=np.int32)
        for at in (device == NOWHERE).nonzero()[0].tolist():
            host = self.tier.find(group.number, names[at])
            host_blocks[at] = NOWHERE if host is None else host
        source = NOWHERE
        if position % group.block_tokens:
            entry = index.extending(chain[end])
            source = NOWHERE if entry is None else entry[0]
        return GroupHit(first=first, device=device, host=host_blocks, source=source)


_NO_ENTRY: Entry = (NOWHERE, b"", b"")


def _common(theirs: bytes, mine: bytes) -> int:
    """Length of the common beginning in tokens."""
    if theirs.startswith(mine):
        return len(mine) // 4
    count = min(len(theirs), len(mine)) // 4
    a = np.frombuffer(theirs, dtype="<i4", count=count)
    b = np.frombuffer(mine, dtype="<i4", count=count)
    differ = (a != b).nonzero()[0]
    return int(differ[0]) if len(differ) else count


def nothing(groups: tuple[Group, ...]) -> Hit:
    """No prefix is known."""
    empty = GroupHit(device=int32(()), host=int32(()))
    return Hit(tokens=0, groups=(empty,) * len(groups))
