"""What attention needs to know of one batch, worked out once for all layers.

Decode rows of like context are put together into groups, each one padded call; a prefill chunk is a
call of its own, over cached context and chunk with a causal mask. Where queries see a window only, no
block that lies wholly behind it is read, whatever the table says there. Everything here is made on the
host from the batch's metadata: places in the pool, masks, and scratch that the layers share.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.device.host_sync import device_code
from tokenspeed.device.kernels.paged import PagedBatch, PagedLayout, token_places
from tokenspeed.device.step import RaggedRows

IntArray: TypeAlias = npt.NDArray[np.int64]

LIKE_CONTEXTS = 2
"""Decode rows share a call while the longest context has at most this many times the blocks of the shortest,"""

SMALL_CONTEXT_BLOCKS = 16
"""or at most this many blocks: padding costs less than another call."""

SPACE_BYTES = 4 << 20
"""Scratch of one call of several rows. What was gathered should still be in the cache when it is read."""


@attrs.frozen(kw_only=True)
class KvGeometry:
    """Shape of one cache group's part of the pool, as far as addresses depend on it.

    Attributes:
        window: tokens a query sees, itself included; 0: all before it.
        follows_tables: see `Kernels.follows_tables`.
    """

    page_tokens: int
    kv_heads: int
    head_dim: int
    run_stride: int
    window: int = 0
    follows_tables: bool = False

    @property
    def block_bytes(self) -> int:
        """Keys and values of one page in one layer."""
        return 2 * self.kv_heads * self.page_tokens * self.head_dim * 4


@attrs.frozen(kw_only=True, eq=False)
class PagedRows:
    """`R` rows with `n` queries each whose attention is one call. See `AttentionKernel` for the tensors.

    Attributes:
        tokens: int64 ``[R * n]``, the queries' indices into the batch's tokens; None: all, in order.
        decode: n is 1.
    """

    rows: int
    tokens: torch.Tensor | None
    decode: bool
    pages: torch.Tensor
    mask: torch.Tensor
    space: torch.Tensor


@attrs.frozen(kw_only=True)
class FreshRow:
    """A first chunk, not longer than the window: tokens ``first:last`` attend to each other and those before."""

    first: int
    last: int


@attrs.frozen(kw_only=True, eq=False)
class AttentionBatch:
    """One batch, ready for every layer.

    Attributes:
        places: int64 ``[T * 2 * kv_heads]``, where each token's keys and values go, see `KvWriteKernel`.
        opened: pages whose first token this batch writes and whose last it does not. They are
            zeroed before: what an earlier owner left there, perhaps not numbers, would reach the
            new owner through padded reads.
        by_tables: what kernels that follow block tables read, in place of `paged` and `fresh`.
    """

    places: torch.Tensor
    opened: tuple[int, ...]
    paged: tuple[PagedRows, ...]
    fresh: tuple[FreshRow, ...]
    by_tables: PagedBatch | None = None


def attention_batch(batch: RaggedRows, kv: KvGeometry, tables: torch.Tensor) -> AttentionBatch:
    """Plan the attention of `batch`.

    Where kernels follow block tables nothing is read on the host, and the tensors may be anywhere;
    otherwise they are CPU tensors.

    Args:
        tables: int32 ``[n, blocks]``, the block tables of the cache group.
    """
    return _by_tables(batch, kv, tables) if kv.follows_tables else _planned(batch, kv, tables)


def _by_tables(batch: RaggedRows, kv: KvGeometry, tables: torch.Tensor) -> AttentionBatch:
    """Such kernels read nothing behind a context, so that no page has to be cleared for them."""
    layout = PagedLayout(page_tokens=kv.page_tokens, kv_heads=kv.kv_heads, run_stride=kv.run_stride, window=kv.window)
    paged = PagedBatch(tables=tables, offsets=batch.offsets, contexts=batch.contexts, layout=layout)
    return AttentionBatch(places=token_places(paged, batch.positions), opened=(), paged=(), fresh=(), by_tables=paged)


@device_code
def _planned(batch: RaggedRows, kv: KvGeometry, tables: torch.Tensor) -> AttentionBatch:
    offsets, contexts = batch.offsets.numpy(), batch.contexts.numpy()
    positions, blocks = batch.positions.numpy(), tables.numpy()
    counts = np.diff(offsets)
    starts = contexts - counts
    last_page = contexts // kv.page_tokens
    opens = (contexts % kv.page_tokens != 0) & (last_page * kv.page_tokens >= starts)
    seen = _seen_blocks(starts, contexts, kv)
    alone = (starts == 0) & ((counts <= kv.window) | (kv.window == 0))
    chunks = np.flatnonzero((counts != 1) & ~alone)[:, None]  # each a group of its own
    groups = [*_decode_groups(np.flatnonzero(counts == 1), seen, kv), *chunks]
    widths = [int(seen.counts[rows].max()) for rows in groups]
    space = _space([len(rows) * width for rows, width in zip(groups, widths, strict=True)], kv)
    paged = [
        _rows(
            rows,
            offsets,
            contexts,
            _gather(seen, rows, width, blocks, kv),
            kv,
            space,
            whole=len(rows) == len(positions),
        )
        for rows, width in zip(groups, widths, strict=True)
    ]
    fresh = np.flatnonzero((counts != 1) & alone).tolist()
    return AttentionBatch(
        places=_places(positions, np.repeat(np.arange(len(counts)), counts), blocks, kv),
        opened=tuple(blocks[np.flatnonzero(opens), last_page[opens]].tolist()),
        paged=tuple(paged),
        fresh=tuple(FreshRow(first=int(offsets[row]), last=int(offsets[row + 1])) for row in fresh),
    )


@attrs.frozen(kw_only=True, eq=False)
class _Seen:
    """The blocks that the queries of each row see: `counts` from block `first` on; int64 ``[n]`` both."""

    first: IntArray
    counts: IntArray


@attrs.frozen(kw_only=True, eq=False)
class _Gathered:
    """Blocks of some rows, side by side.

    Attributes:
        pages: int32 ``[rows, width]``; 0 behind a row's context.
        first: int64 ``[rows, 1]``, position of the first token of the first of them.
    """

    pages: npt.NDArray[np.int32]
    first: IntArray


def _seen_blocks(starts: IntArray, contexts: IntArray, kv: KvGeometry) -> _Seen:
    first = np.maximum(starts - kv.window + 1, 0) // kv.page_tokens if kv.window else np.zeros_like(starts)
    return _Seen(first=first, counts=-(-contexts // kv.page_tokens) - first)


def _gather(seen: _Seen, rows: IntArray, width: int, tables: npt.NDArray[np.int32], kv: KvGeometry) -> _Gathered:
    """`width` blocks of each row from the first that it sees."""
    steps = np.arange(width)
    there = steps < seen.counts[rows, None]
    columns = np.where(there, seen.first[rows, None] + steps, 0)
    pages = np.where(there, tables[rows[:, None], columns], np.int32(0))
    return _Gathered(pages=pages, first=seen.first[rows, None] * kv.page_tokens)


def _places(positions: IntArray, rows: IntArray, tables: npt.NDArray[np.int32], kv: KvGeometry) -> torch.Tensor:
    pages = tables[rows, positions // kv.page_tokens].astype(np.int64)
    heads = np.arange(2 * kv.kv_heads)
    runs = (pages * kv.run_stride)[:, None] + heads
    return torch.from_numpy((runs * kv.page_tokens + (positions % kv.page_tokens)[:, None]).reshape(-1))


def _decode_groups(rows: IntArray, seen: _Seen, kv: KvGeometry) -> list[IntArray]:
    """Split decode rows so that no padded call is much larger than its rows, and none needs much scratch.

    Rows that see alike many blocks keep their order.
    """
    if not len(rows):
        return []
    blocks = seen.counts[rows]
    if blocks.max() > max(SMALL_CONTEXT_BLOCKS, LIKE_CONTEXTS * blocks.min()):
        order = np.argsort(blocks, kind="stable")
        rows, blocks = rows[order], blocks[order]
    groups, begin = [], 0
    while begin < len(rows):
        limit = max(SMALL_CONTEXT_BLOCKS, LIKE_CONTEXTS * int(blocks[begin]))
        longest = np.maximum.accumulate(blocks[begin:])
        alike = int(np.searchsorted(longest, limit, side="right"))
        small = np.arange(1, alike + 1) * longest[:alike] * kv.block_bytes <= SPACE_BYTES
        end = begin + max(1, int(np.count_nonzero(small)))
        groups.append(rows[begin:end])
        begin = end
    return groups


def _rows(
    rows: IntArray,
    offsets: IntArray,
    contexts: IntArray,
    gathered: _Gathered,
    kv: KvGeometry,
    space: torch.Tensor,
    *,
    whole: bool,
) -> PagedRows:
    """Decode rows, or one chunk behind cached context. Query i of a row sees its window up to itself.

    Args:
        space: float32, as long as the largest call of the batch needs.
    """
    first, last = offsets[rows], offsets[rows + 1]
    count = int(last[0] - first[0])
    padded = gathered.pages.shape[1] * kv.page_tokens
    own = ((contexts[rows] - count)[:, None] + np.arange(count))[:, :, None]
    there = (gathered.first + np.arange(padded))[:, None]
    sees = (there <= own) & (there > own - kv.window) if kv.window else there <= own
    mask = np.where(sees, np.float32(0), np.float32(-np.inf))
    shape = (2, len(rows), kv.kv_heads, padded, kv.head_dim)
    return PagedRows(
        rows=len(rows),
        tokens=None if whole else torch.from_numpy((first[:, None] + np.arange(count)).reshape(-1)),
        decode=count == 1,
        pages=_pages(gathered.pages, kv),
        mask=torch.from_numpy(mask)[:, None],
        space=space[: math.prod(shape)].view(shape),
    )


def _pages(tables: npt.NDArray[np.int32], kv: KvGeometry) -> torch.Tensor:
    """Pool runs of ``[R, blocks]`` pages in the order of `AttentionKernel`: keys and values, rows, heads, blocks."""
    runs = tables.astype(np.int64)[None, :, None, :] * kv.run_stride
    heads = np.arange(2 * kv.kv_heads).reshape(2, 1, kv.kv_heads, 1)
    return torch.from_numpy((runs + heads).reshape(-1))


def _space(blocks: list[int], kv: KvGeometry) -> torch.Tensor:
    """Scratch that all calls share, since they run one after another; `blocks` has the pages each one gathers."""
    return torch.empty(max(blocks, default=0) * kv.block_bytes // 4, dtype=torch.float32)
