"""Attention of one query a row over paged keys and values, the context split among programs.

Source: Kwon et al. 2023 (PagedAttention, arXiv:2309.06180, section 4.3) for the walk over a block table;
Dao et al. 2023 ("Flash-Decoding") for the split of the context and the combination of its parts; the
running softmax is that of Milakov and Gimelshein 2018 (arXiv:1805.02867).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed.device.kernels.paged import PagedBatch

SPLIT_TOKENS = 512
"""A program works on at least so many tokens of the longest context that the tables have room for,"""

MOST_SPLITS = 16
"""until a context has this many programs."""

BLOCK_TOKENS = 32
LEAST_DOT = 16
"""Rows and columns of the smallest matrix product that Triton has."""


def paged_decode(q: torch.Tensor, vectors: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    """See `PagedAttentionKernel`; one query a row."""
    rows, heads, dim = q.shape
    layout, out = batch.layout, q.new_empty(q.shape)
    if not rows:
        return out
    group = heads // layout.kv_heads
    # By the tables' width, not by contexts: those are on the device, and a captured graph has one grid.
    splits = min(MOST_SPLITS, triton.cdiv(batch.tables.shape[1] * layout.page_tokens, SPLIT_TOKENS))
    mixed, stats = q.new_empty((rows, heads, splits, dim)), q.new_empty((rows, heads, splits, 2))
    block_dim = max(LEAST_DOT, triton.next_power_of_2(dim))
    _decode_part[(rows, layout.kv_heads, splits)](
        q,
        vectors,
        batch.tables,
        batch.contexts,
        mixed,
        stats,
        dim**-0.5,
        q.stride(0),
        q.stride(1),
        batch.tables.stride(0),
        layout.run_stride,
        layout.page_tokens,
        layout.window,
        splits,
        KV_HEADS=layout.kv_heads,
        GROUP=group,
        BLOCK_GROUP=max(LEAST_DOT, triton.next_power_of_2(group)),
        DIM=dim,
        BLOCK_DIM=block_dim,
        BLOCK=BLOCK_TOKENS,
    )
    _decode_sum[(rows, heads)](mixed, stats, out, heads, splits, DIM=dim, BLOCK_DIM=block_dim)
    return out


@triton.jit(do_not_specialize=["table_stride", "run_stride", "page_tokens", "window", "splits"])
def _decode_part(
    q,
    vectors,
    tables,
    contexts,
    mixed,
    stats,
    scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    run_stride,
    page_tokens,
    window,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row, kv head and part of the context, for all query heads of that kv head.

    q: float32 [rows, KV_HEADS * GROUP, DIM], last stride 1. vectors: float32 [*, DIM]. tables: int32
    [rows, *]. contexts: int64 [rows]. mixed: float32 [rows, heads, splits, DIM], not divided by the
    sum of weights. stats: float32 [rows, heads, splits, 2], largest score and sum of weights; -inf and 0
    for a part without tokens. grid: (rows, KV_HEADS, splits).
    """
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    first = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    each = tl.cdiv(tl.cdiv(context - first, splits), BLOCK) * BLOCK
    begin = first + split * each
    end = tl.minimum(begin + each, context)

    member, column, step = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK)
    head = kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + row * q_row_stride + head[:, None] * q_head_stride + column[None, :], mask=inside, other=0.0)
    most = tl.full([BLOCK_GROUP], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
    sums = tl.zeros([BLOCK_GROUP, BLOCK_DIM], dtype=tl.float32)
    for at in range(begin, end, BLOCK):
        there = at + step
        seen = there < end
        page = tl.load(tables + row * table_stride + there // page_tokens, mask=seen, other=0).to(tl.int64)
        key = (page * run_stride + kv_head) * page_tokens + there % page_tokens
        read = seen[:, None] & (column < DIM)[None, :]
        keys = tl.load(vectors + key[:, None] * DIM + column[None, :], mask=read, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, axis=1))
        kept = tl.exp(most - largest)
        weights = tl.exp(scores - largest[:, None])
        value = key + KV_HEADS * page_tokens
        values = tl.load(vectors + value[:, None] * DIM + column[None, :], mask=read, other=0.0)
        sums = sums * kept[:, None] + tl.dot(weights, values, input_precision="ieee")
        total = total * kept + tl.sum(weights, axis=1)
        most = largest
    part = (row * (KV_HEADS * GROUP) + head) * splits + split
    tl.store(mixed + part[:, None] * DIM + column[None, :], sums, mask=inside)
    tl.store(stats + part * 2, most, mask=member < GROUP)
    tl.store(stats + part * 2 + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _decode_sum(mixed, stats, out, heads, splits, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """One program a row and head: the parts' weighted mean; zeros where no part has tokens.

    mixed, stats: as in `_decode_part`. out: float32 [rows, heads, DIM]. grid: (rows, heads).
    """
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    column = tl.arange(0, BLOCK_DIM)
    inside = column < DIM
    most = float("-inf")
    for split in range(splits):
        most = tl.maximum(most, tl.load(stats + (place * splits + split) * 2))
    # A padded row has no part with tokens: -inf less -inf is no number.
    base = tl.where(most > float("-inf"), most, 0.0)
    total = 0.0
    sums = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    for split in range(splits):
        part = place * splits + split
        weight = tl.exp(tl.load(stats + part * 2) - base)
        total += weight * tl.load(stats + part * 2 + 1)
        sums += weight * tl.load(mixed + part * DIM + column, mask=inside, other=0.0)
    tl.store(out + place * DIM + column, sums / tl.where(total > 0.0, total, 1.0), mask=inside)
