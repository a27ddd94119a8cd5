"""The prefix cache over all cache groups: one index and one event log each, and when blocks become findable."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Finish, IndexArray, Int32Array
from tokenspeed.plane.plan import EMPTY_INDEX
from tokenspeed.plane.results import KvEvent
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.groups import UNBOUNDED, Group
from tokenspeed.scheduler.hits import NOWHERE, Hit
from tokenspeed.scheduler.index import GroupIndex
from tokenspeed.scheduler.kv_log import KvLog
from tokenspeed.scheduler.names import NAME_BYTES, Chains
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.prefix import Landed, Relink
from tokenspeed.scheduler.reach import Reach
from tokenspeed.scheduler.tier import Tier

PageArray: TypeAlias = npt.NDArray[np.void]
# Arrays without dimensions: numpy takes them faster than Python's numbers.
ZERO: Int32Array = np.array(0, dtype=np.int32)
ONE: IndexArray = np.array(1, dtype=np.int64)


@attrs.define(eq=False)
class PublishState:
    """Writer: PrefixIndex.

    Attributes:
        published: int64 ``[groups, slots]``, blocks of the seated row that are matched or published.
        lanes: rows of the latest landing in which each computed one token; the same array comes again
            while the batch does not change.
        quiet: landings of the same rows, one token each, in which none of them fills a block.
        turn: such landings so far.
        due: by group, turn modulo block tokens to the rows that fill a block then, as far as they were seen.
    """

    published: IndexArray
    lanes: IndexArray = EMPTY_INDEX
    quiet: int = 0
    turn: int = 0
    due: dict[int, dict[int, _Due]] = attrs.field(factory=dict)


class _Due(NamedTuple):
    """Rows with a full block and their slots, int64 ``[m]``; landings behind this one until a row fills the next."""

    rows: list[int]
    slots: IndexArray
    quiet: int


def _full(landed: Landed, beyond: Int32Array, size: int) -> _Due:
    """`beyond`: tokens of each row behind its last full block of `size` tokens."""
    at = (beyond == ZERO).nonzero()[0]
    return _Due(landed.rows[at].tolist(), landed.slots[at], size - 1 - int(np.maximum.reduce(beyond)))


@attrs.define(eq=False)
class _Change:
    """What one publication does beyond the index itself."""

    relinks: list[Relink] = attrs.field(factory=list)
    blocks: list[int] = attrs.field(factory=list)
    names: list[bytes] = attrs.field(factory=list)


@attrs.frozen(kw_only=True, eq=False)
class PrefixIndex:
    """One index and one event log a group; logs of state groups are null, routers cannot use them."""

    page_tokens: int
    table: RequestTable
    pool: Pool
    groups: tuple[Group, ...]
    chains: Chains
    indexes: tuple[GroupIndex, ...]
    logs: tuple[KvLog, ...]
    tier: Tier
    reach: Reach
    state: PublishState
    pages: PageArray = attrs.field(init=False)
    """The table's token lines by pages, a view ``[slots, pages]``; an element is a page's ids, 4 bytes each.

    Gathered as they lie in memory: ids in names are little-endian, as in the memory of the hosts this runs on.
    """

    @pages.default
    def _pages(self) -> PageArray:
        lines, page = self.table.tokens.seated, self.page_tokens
        if lines.astype("<i4", copy=False) is not lines:
            raise InvariantBroken("names need little-endian token lines", dtype=lines.dtype.str)
        pages: PageArray = np.ndarray(
            (len(lines), lines.shape[1] // page),
            dtype=np.dtype((np.void, page * lines.itemsize)),
            buffer=lines,
            strides=(lines.strides[0], page * lines.itemsize),
        )
        pages.setflags(write=False)
        return pages

    def claim(self, group: int, count: int) -> Int32Array:
        blocks, evicted = self.pool.take(group, count)
        for lost in evicted:
            for block in lost.blocks:
                name, whole = self._remove(lost.group, block)
                if whole:
                    self.tier.evicting(lost.group, block, name)
        return blocks

    def match(self, row: int, *, most: int) -> Hit:
        return self.reach.match(row, most=most)

    def named(self, row: int, *, most: int) -> bool:
        return self.reach.named(row, most=most)

    def cached_tokens(self, row: int) -> int:
        most = int(self.table.tokens.known[row]) - 1
        self.reach.named(row, most=most)
        return self.reach.length(row, most=most)

    def grew(self, row: int, *, tokens: int) -> bool:
        """Looks for one page more in the first group; a hit that ends elsewhere may have grown unseen."""
        chain, at = self.chains.of(row), tokens // self.page_tokens + 1
        return at < len(chain) and self.indexes[0].block(chain[at]) is not None

    def seat(self, row: int, slot: int, hit: Hit) -> None:
        self.chains.of(row)
        for group, found in zip(self.groups, hit.groups, strict=True):
            # What is loaded becomes findable with the first forward that lands.
            on_device = found.device == NOWHERE
            self.state.published[group.number, slot] = found.first + (
                int(on_device.argmax()) if on_device.any() else len(on_device)
            )

    def skip(self, group: int, slot: int, blocks: int) -> None:
        published = self.state.published
        published[group, slot] = max(int(published[group, slot]), blocks)

    def forget(self, row: int) -> None:
        self.chains.forget(row)

    def publish(self, landed: Landed) -> list[Relink]:
        state = self.state
        # The same rows again, with one token each: all that was full before has been published.
        steady = landed.rows is state.lanes and not landed.some_ended
        if steady:
            state.turn += 1
            state.quiet -= 1
            if state.quiet >= 0:
                return []
        else:
            state.turn = 0
            state.due.clear()
        relinks: list[Relink] = []
        state.quiet = UNBOUNDED
        for group in self.groups:
            if group.by_position:
                relinks += self._publish_group(group, landed, steady=steady)
        state.lanes = landed.rows if landed.by_one else EMPTY_INDEX
        return relinks

    def keep(self, group: int, row: int, block: int, position: int) -> None:
        name = self.chains.behind(row, position)
        index = self.indexes[group]
        if index.block(name) is not None or index.name(block) is not None:
            return
        begin = (position - 1) // self.page_tokens
        parent = self.chains.of(row)[begin]
        tokens = self.chains.tokens(row, begin * self.page_tokens, position)
        index.store(name, block, parent, tokens, text=not self.chains.has_media(row, begin))
        self.pool.mark_findable(group, [block])
        if not position % self.page_tokens:
            self.tier.published(group, [block], [name])

    def keeps(self, group: int, block: int) -> bool:
        return self.indexes[group].name(block) is not None

    def unkeep(self, group: int, block: int) -> None:
        if self.indexes[group].name(block) is not None:
            self._remove(group, block)
            self.tier.forgotten(group, block)
            self.pool.forget(group, block)

    def clear(self) -> None:
        if self.pool.active:
            raise InvariantBroken("the prefix cache was cleared under a request", active=self.pool.active)
        self.pool.discard_all_idle()
        for index, log in zip(self.indexes, self.logs, strict=True):
            index.clear()
            log.cleared()
        self.tier.clear()

    def drain(self) -> tuple[KvEvent, ...]:
        if len(self.logs) == 1:
            return self.logs[0].drain()
        events = [event for log in self.logs for event in log.drain()]
        cleared = [event for event in events if not hasattr(event, "hashes")]
        return (*cleared[:1], *(event for event in events if hasattr(event, "hashes"))) if cleared else tuple(events)

    def contents(self) -> tuple[dict[bytes, int], ...]:
        return tuple({name: entry[0] for name, entry in index.state.entries.items()} for index in self.indexes)

    def block(self, group: int, name: bytes) -> int | None:
        return self.indexes[group].block(name)

    def names(self, row: int, group: int, *, tokens: int) -> list[bytes]:
        kind = self.groups[group]
        count = tokens // kind.block_tokens
        return self.chains.upto(row, count * kind.stride)[kind.stride : count * kind.stride + 1 : kind.stride]

    # ---- publication --------------------------------------------------------------------------

    def _publish_group(self, group: Group, landed: Landed, *, steady: bool) -> list[Relink]:
        published, size = self.state.published[group.number], group.block_tokens
        if steady:
            due = self._due(group, landed)
            if not due.rows:
                return []
            first = published[due.slots]
            full = first + ONE
        else:
            quiet = size - 1 - int((landed.ends % size).max())
            self.state.quiet = min(self.state.quiet, quiet)
            full = landed.ends // size
            if landed.some_ended:
                full = self._trusted(landed, full, size)
            at = (full > published[landed.slots]).nonzero()[0]
            if not len(at):
                return []
            due, full = _Due(landed.rows[at].tolist(), landed.slots[at], quiet), full[at]
            first = published[due.slots]
        slots = due.slots
        published[slots] = full
        change, table = _Change(), landed.tables[group.number]
        if group.stride == 1 and (steady or (full - first).max() == 1):
            self._publish_one_each(group, due, first, table, change)
        else:
            for row, slot, begin, end in zip(due.rows, slots.tolist(), first.tolist(), full.tolist(), strict=True):
                self._publish_span(group, row, slot, begin, table[slot, begin:end].tolist(), change)
            self.pool.mark_findable(group.number, change.blocks)
        self.tier.published(group.number, change.blocks, change.names)
        return change.relinks

    def _due(self, group: Group, landed: Landed) -> _Due:
        """Of the same rows again, those that fill a block now: the same ones every ``block_tokens`` landings."""
        state, size = self.state, group.block_tokens
        known = state.due.setdefault(group.number, {})
        due = known.get(state.turn % size)
        if due is None:
            due = known[state.turn % size] = _full(landed, landed.ends % np.array(size, dtype=np.int32), size)
        state.quiet = min(state.quiet, due.quiet)
        return due

    def _trusted(self, landed: Landed, full: Int32Array, block_tokens: int) -> Int32Array:
        """Of rows that have ended: nothing of those cut short (a logit may not have been a number), and
        of the others no token that was never committed, which a surplus forward has computed KV of."""
        known = self.table.tokens.known[landed.rows] // block_tokens
        cut = self.table.output.finish[landed.rows] == Finish.ABORT
        return np.where(cut, np.int32(0), np.minimum(full, known))

    def _publish_one_each(self, group: Group, due: _Due, at: IndexArray, table: Int32Array, change: _Change) -> None:
        """The usual case of decoding: one more full block for each of the rows, read with one gather."""
        slots = due.slots
        chains, media = self.chains.state.chains, self.table.identity.media
        index, stored = self.indexes[group.number].state, self.logs[group.number].stored
        entries, name_of, latest = index.entries, index.name_of, index.latest
        taken = table[slots, at]
        columns = slots.tolist(), at.tolist(), taken.tolist(), self.pages[slots, at].tolist()
        for row, slot, place, block, tokens in zip(due.rows, *columns, strict=True):
            chain, text = chains[row], not media[row]
            if text and len(chain) == place + 1:
                parent = chain[place]
                name = blake2b(parent + tokens, digest_size=NAME_BYTES).digest()
                chain.append(name)
            else:  # it has its name already, or lacks others before it, or an image is part of it
                chain = self.chains.upto(row, place + 1)
                parent, name = chain[place], chain[place + 1]
            if (name in entries or block in name_of) and not self._displace(group, slot, place, block, name, change):
                continue
            entries[name] = (block, parent, tokens)
            name_of[block] = name
            if text:
                latest[parent] = name
            stored(name, parent if place else None, tokens)
            change.blocks.append(block)
            change.names.append(name)
        # An array is cheaper to index with than a list of the same.
        self.pool.mark_findable(group.number, taken if len(change.blocks) == len(taken) else change.blocks)

    def _publish_span(self, group: Group, row: int, slot: int, first: int, blocks: list[int], change: _Change) -> None:
        """Blocks `first`, ... of `row` become findable."""
        index, log, stride = self.indexes[group.number], self.logs[group.number], group.stride
        chain, media = self.chains.upto(row, (first + len(blocks)) * stride), self.table.identity.media[row]
        width = 4 * group.block_tokens
        data = self.chains.tokens(row, first * group.block_tokens, (first + len(blocks)) * group.block_tokens)
        for at, block in enumerate(blocks, first):
            name, parent = chain[(at + 1) * stride], chain[at * stride]
            known = index.block(name) is not None or index.name(block) is not None
            if known and not self._displace(group, slot, at, block, name, change):
                continue
            tokens = data[(at - first) * width : (at - first + 1) * width]
            index.store(name, block, parent, tokens, text=not media)
            log.stored(name, parent if at else None, tokens)
            change.blocks.append(block)
            change.names.append(name)

    def _displace(self, group: Group, slot: int, at: int, block: int, name: bytes, change: _Change) -> bool:
        """Make way for `block` under `name`; False: the index has another block in use, which is to be shared."""
        number, index = group.number, self.indexes[group.number]
        other = index.block(name)
        if other is not None and self.pool.references(number, other):
            if other != block:
                change.relinks.append(Relink(number, slot, at, other))
            return False
        if other is not None:
            # Same content, one copy idle: the one in use stays findable, the idle one makes room.
            self._remove(number, other)
            self.tier.forgotten(number, other)
            self.pool.forget(number, other)
        if index.name(block) is not None:
            # It was findable as a page in part, and has filled since.
            self._remove(number, block)
        return True

    def _remove(self, group: int, block: int) -> tuple[bytes, bool]:
        """Unfindable from now on; returns the name and whether it was a whole block's."""
        name, tokens = self.indexes[group].remove(block)
        whole = not len(tokens) // 4 % self.page_tokens
        if whole:
            self.logs[group].removed(name)
        return name, whole
