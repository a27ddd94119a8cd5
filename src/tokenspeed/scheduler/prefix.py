"""The prefix cache: full blocks of computed tokens, found by chained hashes of their tokens.

The name of a block is ``blake2b(name of the block before it, its tokens)``; the chain of a request
begins at a root made of the cache group and the request's salt, so that equal tokens under another
salt or in another group are another prefix.

The index is a forest at all times: a name is in it only together with the name it extends. It holds
because whoever references a block references the same blocks before it that the index knows (`match`
and `publish` see to it), and because a release gives the deepest block first, so that the pool's LRU
evicts leaves before what they extend.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Finish, Int32Array
from tokenspeed.plane.plan import EMPTY_INT32
from tokenspeed.plane.results import KvEvent
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.kv_log import KvLog
from tokenspeed.scheduler.pool import BlockPool

NAME_BYTES = 16


def root_name(*, group: int, salt: bytes) -> bytes:
    """Where the chains of one cache group and salt begin."""
    return hashlib.blake2b(group.to_bytes(4, "little") + salt, digest_size=NAME_BYTES).digest()


def block_name(parent: bytes, tokens: bytes) -> bytes:
    """`tokens`: the block's ids as little-endian int32."""
    return hashlib.blake2b(parent + tokens, digest_size=NAME_BYTES).digest()


@attrs.frozen
class Relink:
    """Block `index` of `slot` is already known to the index as `block`: refer to that one instead."""

    slot: int
    index: int
    block: int


@attrs.frozen
class Landed:
    """Rows of a forward that landed.

    Attributes:
        ends: int32 ``[n]``, tokens of each row whose KV is on the device now.
        tables: int32 ``[slots, blocks]``.
        some_ended: a row of them may have ended, with this result or before.
    """

    rows: Int32Array
    slots: Int32Array
    ends: Int32Array
    tables: Int32Array
    some_ended: bool


class PrefixCache(Protocol):
    """Between the scheduler and the pool: blocks are taken through here, since taking may evict."""

    def claim(self, count: int) -> Int32Array:
        """Take `count` blocks from the pool, forgetting what the evicted ones held."""
        ...

    def match(self, row: int, *, most: int) -> Int32Array:
        """The longest known prefix of the row's tokens, at most `most` blocks. Takes no references."""
        ...

    def grew(self, row: int, *, hits: int) -> bool:
        """Whether `match` would now find more than the `hits` blocks it found last."""
        ...

    def seat(self, row: int, slot: int, *, hits: int) -> None:
        """`row` now computes its tokens in `slot`, from block `hits` on."""
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

    def clear(self) -> None:
        """Forget all; no block may be active."""
        ...

    def drain(self) -> tuple[KvEvent, ...]: ...

    def contents(self) -> dict[bytes, int]:
        """A copy: name to block."""
        ...


@attrs.define(eq=False)
class IndexState:
    """Writer: PrefixIndex.

    ``chains``: names of a row's first blocks, as far as they were needed. ``published``: int32
    ``[slots]``, blocks of the seated row that are matched or published.
    """

    published: Int32Array
    block_of: dict[bytes, int] = attrs.field(factory=dict[bytes, int])
    name_of: dict[int, bytes] = attrs.field(factory=dict[int, bytes])
    chains: dict[int, list[bytes]] = attrs.field(factory=dict[int, list[bytes]])


@attrs.define(eq=False)
class _Change:
    """What one publication does beyond the index itself."""

    relinks: list[Relink] = attrs.field(factory=list[Relink])
    findable: list[int] = attrs.field(factory=list[int])


@attrs.frozen(kw_only=True, eq=False)
class PrefixIndex:
    page_tokens: int
    table: RequestTable
    pool: BlockPool
    log: KvLog
    state: IndexState
    group: int = 0

    def claim(self, count: int) -> Int32Array:
        blocks, evicted = self.pool.take(count)
        for block in evicted:
            name = self.state.name_of.pop(block)
            del self.state.block_of[name]
            self.log.removed(name)
        return blocks

    def match(self, row: int, *, most: int) -> Int32Array:
        if most <= 0:
            return EMPTY_INT32
        chain = self.state.chains.setdefault(row, [])
        block_of, width = self.state.block_of, 4 * self.page_tokens
        tokens = self._tokens(row, most).data.cast("B")
        hits: list[int] = []
        for at in range(most):
            if at == len(chain):
                # Names are made one by one: after a miss, the rest of a long prompt is not hashed here.
                self._extend(row, chain, tokens[at * width : (at + 1) * width].tobytes())
            block = block_of.get(chain[at])
            if block is None:
                break
            hits.append(block)
        return np.array(hits, dtype=np.int32)

    def grew(self, row: int, *, hits: int) -> bool:
        chain = self.state.chains.get(row, ())
        return hits < len(chain) and chain[hits] in self.state.block_of

    def seat(self, row: int, slot: int, *, hits: int) -> None:
        self.state.chains.setdefault(row, [])
        self.state.published[slot] = hits

    def forget(self, row: int) -> None:
        self.state.chains.pop(row, None)

    def publish(self, landed: Landed) -> list[Relink]:
        published, page = self.state.published, self.page_tokens
        full = landed.ends // page
        if landed.some_ended:
            full = self._trusted(landed, full)
        due = (full > published[landed.slots]).nonzero()[0]
        if not len(due):
            return []
        rows, slots, full = landed.rows[due], landed.slots[due], full[due]
        first = published[slots]
        published[slots] = full
        change = _Change()
        if (full - first).max() == 1:
            self._publish_one_each(rows, slots, first, landed.tables, change)
        else:
            for row, slot, begin, end in zip(rows.tolist(), slots.tolist(), first.tolist(), full.tolist(), strict=True):
                data = self._tokens(row, end)[begin * page :].tobytes()
                self._insert(row, slot, begin, data, landed.tables[slot, begin:end].tolist(), change)
        self.pool.mark_findable(change.findable)
        return change.relinks

    def clear(self) -> None:
        if self.pool.active:
            raise InvariantBroken("the prefix cache was cleared under a request", active=self.pool.active)
        self.pool.discard_all_idle()
        self.state.block_of.clear()
        self.state.name_of.clear()
        self.log.cleared()

    def drain(self) -> tuple[KvEvent, ...]:
        return self.log.drain()

    def contents(self) -> dict[bytes, int]:
        return dict(self.state.block_of)

    def _trusted(self, landed: Landed, full: Int32Array) -> Int32Array:
        """Of rows that have ended: nothing of those cut short (a logit may not have been a number), and
        of the others no token that was never committed, which a surplus forward has computed KV of."""
        known = self.table.tokens.known[landed.rows] // self.page_tokens
        cut = self.table.output.finish[landed.rows] == Finish.ABORT
        return np.where(cut, np.int32(0), np.minimum(full, known))

    def _publish_one_each(
        self, rows: Int32Array, slots: Int32Array, at: Int32Array, tables: Int32Array, change: _Change
    ) -> None:
        """The usual case of decoding: one more full block for each of `rows`, read with one gather."""
        positions = at[:, None] * self.page_tokens + np.arange(self.page_tokens, dtype=np.int32)
        data = self.table.tokens.seated[slots[:, None], positions].astype("<i4", copy=False).tobytes()
        width, begin = 4 * self.page_tokens, 0
        for row, slot, index, block in zip(
            rows.tolist(), slots.tolist(), at.tolist(), tables[slots, at].tolist(), strict=True
        ):
            self._insert(row, slot, index, data[begin : begin + width], (block,), change)
            begin += width

    def _insert(self, row: int, slot: int, first: int, data: bytes, blocks: Sequence[int], change: _Change) -> None:
        """Blocks `first`, ... of `row`, full of the tokens in `data`, become findable."""
        state, width = self.state, 4 * self.page_tokens
        chain = state.chains[row]
        for at, own in enumerate(blocks, first):
            tokens = data[(at - first) * width : (at - first + 1) * width]
            if at == len(chain):
                self._extend(row, chain, tokens)
            name = chain[at]
            other = state.block_of.get(name)
            if other is None:
                self.log.stored(name, chain[at - 1] if at else None, tokens)
            elif self.pool.references(other):
                change.relinks.append(Relink(slot, at, other))
                continue
            else:
                # Same content, one copy idle: the one in use stays findable, the idle one makes room.
                del state.name_of[other]
                self.pool.discard_idle(other)
            state.block_of[name] = own
            state.name_of[own] = name
            change.findable.append(own)

    def _extend(self, row: int, chain: list[bytes], tokens: bytes) -> None:
        parent = chain[-1] if chain else root_name(group=self.group, salt=self.table.identity.salt[row])
        chain.append(block_name(parent, tokens))

    def _tokens(self, row: int, blocks: int) -> Int32Array:
        tokens = self.table.tokens_of(row)[: blocks * self.page_tokens]
        return np.ascontiguousarray(tokens, dtype="<i4")


@attrs.frozen(kw_only=True, eq=False)
class NullPrefixCache:
    """Every prompt is computed; nothing is kept."""

    pool: BlockPool

    def claim(self, count: int) -> Int32Array:
        blocks, _ = self.pool.take(count)
        return blocks

    def match(self, row: int, *, most: int) -> Int32Array:
        del row, most
        return EMPTY_INT32

    def grew(self, row: int, *, hits: int) -> bool:
        del row, hits
        return False

    def seat(self, row: int, slot: int, *, hits: int) -> None:
        return None

    def forget(self, row: int) -> None:
        return None

    def publish(self, landed: Landed) -> list[Relink]:
        del landed
        return []

    def clear(self) -> None:
        return None

    def drain(self) -> tuple[KvEvent, ...]:
        return ()

    def contents(self) -> dict[bytes, int]:
        return {}
