"""What attention needs to know of one batch, worked out once for all layers.

Decode rows of like context are put together into groups, each one padded call; a prefill chunk is a
call of its own, over cached context and chunk with a causal mask. Everything here is made on the
host from the batch's metadata: places in the pool, masks, and scratch that the layers share.
"""

from __future__ import annotations

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


@attrs.frozen(kw_only=True)
class KvGeometry:
    """Shape of the pool, as far as addresses depend on it."""

    page_tokens: int
    kv_heads: int
    head_dim: int
    run_stride: int


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
    groups = [
        _decode_rows(group, offsets, contexts, tables, kv, whole=len(group) == len(positions))
        for group in _decode_groups(np.flatnonzero(counts == 1), contexts, kv.page_tokens)
    ]
    fresh = []
    for row in np.flatnonzero(counts != 1).tolist():
        if starts[row]:
            groups.append(_chunk(row, offsets, contexts, tables, kv))
        else:
            fresh.append(FreshRow(first=int(offsets[row]), last=int(offsets[row + 1])))
    return AttentionBatch(
        places=_places(positions, np.repeat(np.arange(len(counts)), counts), tables, kv),
        opened=tuple(tables[np.flatnonzero(opens), last_page[opens]].tolist()),
        paged=tuple(groups),
        fresh=tuple(fresh),
    )


def _places(positions: IntArray, rows: IntArray, tables: npt.NDArray[np.int32], kv: KvGeometry) -> torch.Tensor:
    pages = tables[rows, positions // kv.page_tokens].astype(np.int64)
    heads = np.arange(2 * kv.kv_heads)
    runs = (pages * kv.run_stride)[:, None] + heads
    return torch.from_numpy((runs * kv.page_tokens + (positions % kv.page_tokens)[:, None]).reshape(-1))


def _decode_groups(rows: IntArray, contexts: IntArray, page_tokens: int) -> list[IntArray]:
    """Split decode rows so that no padded call is much larger than its rows; one group keeps their order."""
    if not len(rows):
        return []
    blocks = -(-contexts[rows] // page_tokens)
    if blocks.max() <= max(SMALL_CONTEXT_BLOCKS, LIKE_CONTEXTS * blocks.min()):
        return [rows]
    order = np.argsort(blocks, kind="stable")
    rows, blocks = rows[order], blocks[order]
    groups, begin = [], 0
    while begin < len(rows):
        limit = max(SMALL_CONTEXT_BLOCKS, LIKE_CONTEXTS * int(blocks[begin]))
        end = int(np.searchsorted(blocks, limit, side="right"))
        groups.append(rows[begin:end])
        begin = end
    return groups


def _decode_rows(
    rows: IntArray,
    offsets: IntArray,
    contexts: IntArray,
    tables: npt.NDArray[np.int32],
    kv: KvGeometry,
    *,
    whole: bool,
) -> PagedRows:
    blocks = -(-int(contexts[rows].max()) // kv.page_tokens)
    visible = np.arange(blocks * kv.page_tokens) < contexts[rows][:, None]
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    return PagedRows(
        rows=len(rows),
        tokens=None if whole else torch.from_numpy(offsets[rows]),
        decode=True,
        pages=_pages(tables[rows, :blocks], kv),
        mask=torch.from_numpy(mask)[:, None, None, :],
        space=_space(len(rows), blocks, kv),
    )


def _chunk(row: int, offsets: IntArray, contexts: IntArray, tables: npt.NDArray[np.int32], kv: KvGeometry) -> PagedRows:
    """One row's chunk behind cached context: query i sees its context up to itself."""
    first, last, context = int(offsets[row]), int(offsets[row + 1]), int(contexts[row])
    blocks = -(-context // kv.page_tokens)
    own = context - (last - first) + np.arange(last - first)
    visible = np.arange(blocks * kv.page_tokens) <= own[:, None]
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    return PagedRows(
        rows=1,
        tokens=torch.arange(first, last),
        decode=False,
        pages=_pages(tables[row : row + 1, :blocks], kv),
        mask=torch.from_numpy(mask)[None, None],
        space=_space(1, blocks, kv),
    )


def _pages(tables: npt.NDArray[np.int32], kv: KvGeometry) -> torch.Tensor:
    """Pool runs of ``[R, blocks]`` pages in the order of `AttentionKernel`: keys and values, rows, heads, blocks."""
    runs = tables.astype(np.int64)[None, :, None, :] * kv.run_stride
    heads = np.arange(2 * kv.kv_heads).reshape(2, 1, kv.kv_heads, 1)
    return torch.from_numpy((runs + heads).reshape(-1))


def _space(rows: int, blocks: int, kv: KvGeometry) -> torch.Tensor:
    return torch.empty((2, rows, kv.kv_heads, blocks * kv.page_tokens, kv.head_dim), dtype=torch.float32)
