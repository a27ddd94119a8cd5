"""What attention needs to know of one batch, worked out once for all layers.

Decode rows of like context are put together into groups, each one padded call; a prefill chunk is a
call of its own, over cached context and chunk with a causal mask. Everything here is made on the
host from the batch's metadata: places in the pool, masks, and scratch that the layers share.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

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
    """Shape of the pool, as far as addresses depend on it."""

    page_tokens: int
    kv_heads: int
    head_dim: int
    run_stride: int

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
    """A first chunk: tokens ``first:last`` of the batch attend to each other only."""

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
    """

    places: torch.Tensor
    opened: tuple[int, ...]
    paged: tuple[PagedRows, ...]
    fresh: tuple[FreshRow, ...]


def attention_batch(batch: RaggedRows, kv: KvGeometry) -> AttentionBatch:
    """Plan the attention of `batch`; reads its metadata on the host, so the tensors are CPU tensors."""
    offsets, contexts = batch.offsets.numpy(), batch.contexts.numpy()
    positions, tables = batch.positions.numpy(), batch.block_tables.numpy()
    counts = np.diff(offsets)
    starts = contexts - counts
    last_page = contexts // kv.page_tokens
    opens = (contexts % kv.page_tokens != 0) & (last_page * kv.page_tokens >= starts)
    decodes = _decode_groups(np.flatnonzero(counts == 1), contexts, kv)
    chunks = np.flatnonzero((counts != 1) & (starts > 0))[:, None]
    blocks = [-(-int(contexts[rows].max()) // kv.page_tokens) for rows in (*decodes, *chunks)]
    space = _space([len(rows) * count for rows, count in zip((*decodes, *chunks), blocks, strict=True)], kv)
    groups = [
        _rows(rows, offsets, contexts, tables[rows, :count], kv, space, whole=len(rows) == len(positions))
        for rows, count in zip((*decodes, *chunks), blocks, strict=True)
    ]
    fresh = np.flatnonzero((counts != 1) & (starts == 0)).tolist()
    return AttentionBatch(
        places=_places(positions, np.repeat(np.arange(len(counts)), counts), tables, kv),
        opened=tuple(tables[np.flatnonzero(opens), last_page[opens]].tolist()),
        paged=tuple(groups),
        fresh=tuple(FreshRow(first=int(offsets[row]), last=int(offsets[row + 1])) for row in fresh),
    )


def _places(positions: IntArray, rows: IntArray, tables: npt.NDArray[np.int32], kv: KvGeometry) -> torch.Tensor:
    pages = tables[rows, positions // kv.page_tokens].astype(np.int64)
    heads = np.arange(2 * kv.kv_heads)
    runs = (pages * kv.run_stride)[:, None] + heads
    return torch.from_numpy((runs * kv.page_tokens + (positions % kv.page_tokens)[:, None]).reshape(-1))


def _decode_groups(rows: IntArray, contexts: IntArray, kv: KvGeometry) -> list[IntArray]:
    """Split decode rows so that no padded call is much larger than its rows, and none needs much scratch.

    Rows of like context keep their order.
    """
    if not len(rows):
        return []
    blocks = -(-contexts[rows] // kv.page_tokens)
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
    tables: npt.NDArray[np.int32],
    kv: KvGeometry,
    space: torch.Tensor,
    *,
    whole: bool,
) -> PagedRows:
    """Decode rows, or one chunk behind cached context. Query i of a row sees its context up to itself.

    Args:
        tables: int32 ``[len(rows), blocks]``.
        space: float32, as long as the largest call of the batch needs.
    """
    first, last = offsets[rows], offsets[rows + 1]
    count = int(last[0] - first[0])
    padded = tables.shape[1] * kv.page_tokens
    own = (contexts[rows] - count)[:, None] + np.arange(count)
    mask = np.where(np.arange(padded) <= own[:, :, None], np.float32(0), np.float32(-np.inf))
    shape = (2, len(rows), kv.kv_heads, padded, kv.head_dim)
    return PagedRows(
        rows=len(rows),
        tokens=None if whole else torch.from_numpy((first[:, None] + np.arange(count)).reshape(-1)),
        decode=count == 1,
        pages=_pages(tables, kv),
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
