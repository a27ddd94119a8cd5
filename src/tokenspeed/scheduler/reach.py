"""How far the known prefix of a request reaches, over all cache groups.

Every group limits the hit: a full group to the blocks that follow each other from the start, a window
group to a position whose window is there, a state group to a position whose state was kept. The
groups are asked in turn until none shortens the hit any more.
"""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.plan import int32
from tokenspeed.scheduler.groups import Group, Kind
from tokenspeed.scheduler.hits import NOWHERE, GroupHit, Hit
from tokenspeed.scheduler.index import GroupIndex
from tokenspeed.scheduler.names import Chains
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

    def _reach_full(self, row: int, group: Group, limit: int) -> int:
        entries, stride = self.indexes[group.number].state.entries, group.stride
        chain, whole, step, at = self.chains.of(row), limit // group.block_tokens, 1, 0
        while at < whole:
            place = (at + 1) * stride
            if place >= len(chain):
                self.chains.upto(row, min(whole * stride, place + step))
                step = min(2 * step, HASHED_AHEAD)
            if chain[place] not in entries and self.tier.find(group.number, chain[place]) is None:
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
        device = np.full(max(end - first, 0), NOWHERE, dtype=np.int32)
        host_blocks = device.copy()
        for at in range(first, end):
            name = chain[(at + 1) * group.stride]
            block = index.block(name)
            if block is not None:
                device[at - first] = block
            else:
                host = self.tier.find(group.number, name)
                host_blocks[at - first] = NOWHERE if host is None else host
        source = NOWHERE
        if position % group.block_tokens:
            entry = index.extending(chain[end])
            source = NOWHERE if entry is None else entry[0]
        return GroupHit(first=first, device=device, host=host_blocks, source=source)


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
