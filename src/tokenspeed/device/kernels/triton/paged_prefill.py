"""Attention of a ragged batch, chunks and decodes mixed, over paged keys and values.

Source: Dao et al. 2022 (FlashAttention, arXiv:2205.14135) for tiles with a running softmax; Kwon et al.
2023 (arXiv:2309.06180) for the block table. Tiles find their row by halving: row i's tiles begin at
number ``offsets[i] // TILE + i``, so that the grid follows from shapes, and no count is read on the host.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed.device.kernels.paged import PagedBatch, PagedLayout
from tokenspeed.device.kernels.triton.paged_decode import BLOCK_TOKENS, LEAST_DOT

TILE = 16
"""Queries of one program."""


def paged_prefill(q: torch.Tensor, vectors: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    """See `PagedAttentionKernel`; any number of queries a row."""
    tokens, heads, dim = q.shape
    layout, out = batch.layout, q.new_zeros(q.shape)
    rows = len(batch.contexts)
    if not tokens:
        return out
    _prefill[(tokens // TILE + rows, heads)](
        q,
        vectors,
        batch.tables,
        batch.offsets,
        batch.contexts,
        out,
        dim**-0.5,
        q.stride(0),
        q.stride(1),
        batch.tables.stride(0),
        layout.run_stride,
        layout.page_tokens,
        layout.window,
        rows,
        KV_HEADS=layout.kv_heads,
        GROUP=heads // layout.kv_heads,
        DIM=dim,
        BLOCK_DIM=max(LEAST_DOT, triton.next_power_of_2(dim)),
        TILE=TILE,
        BLOCK=BLOCK_TOKENS,
    )
    return out


def fresh_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """See `FreshAttentionKernel`: one row whose context is a single page."""
    count, kv_heads, device = q.shape[2], k.shape[1], q.device
    vectors = torch.cat((k[0], v[0])).reshape(-1, q.shape[3])
    batch = PagedBatch(
        tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
        offsets=torch.arange(0, count + 1, max(count, 1), device=device),
        contexts=torch.full((1,), count, dtype=torch.int64, device=device),
        layout=PagedLayout(page_tokens=count, kv_heads=kv_heads, run_stride=2 * kv_heads),
    )
    return paged_prefill(q[0].transpose(0, 1), vectors, batch).transpose(0, 1)[None]


@triton.jit(do_not_specialize=["table_stride", "run_stride", "page_tokens", "window", "rows"])
def _prefill(
    q,
    vectors,
    tables,
    offsets,
    contexts,
    out,
    scale,
    q_token_stride,
    q_head_stride,
    table_stride,
    run_stride,
    page_tokens,
    window,
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a tile of TILE queries of one row, and query head.

    q: float32 [T, KV_HEADS * GROUP, DIM], last stride 1; out: the same, contiguous. vectors: float32
    [*, DIM]. tables: int32 [rows, *]. offsets: int64 [rows + 1]. contexts: int64 [rows].
    grid: (T // TILE + rows, heads); tiles past their row's queries end at once.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        mine = tl.load(offsets + middle) // TILE + middle <= tile
        low = tl.where(mine, middle + 1, low)
        high = tl.where(mine, high, middle)
    row = low - 1
    first_token = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first_token
    context = tl.load(contexts + row)
    begins = (tile - (first_token // TILE + row)) * TILE
    if begins < count:
        query, column, step = begins + tl.arange(0, TILE), tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK)
        inside = (query < count)[:, None] & (column < DIM)[None, :]
        token = first_token + query
        queries = tl.load(
            q + token[:, None] * q_token_stride + head * q_head_stride + column[None, :], mask=inside, other=0.0
        )
        own = context - count + query
        lowest = context - count + begins
        begin = tl.where(window > 0, tl.maximum(lowest - window + 1, 0), 0)
        end = tl.minimum(lowest + TILE, context)
        kv_head = head // GROUP
        most = tl.full([TILE], float("-inf"), dtype=tl.float32)
        total = tl.zeros([TILE], dtype=tl.float32)
        sums = tl.zeros([TILE, BLOCK_DIM], dtype=tl.float32)
        for at in range(begin, end, BLOCK):
            there = at + step
            exists = there < end
            page = tl.load(tables + row * table_stride + there // page_tokens, mask=exists, other=0).to(tl.int64)
            key = (page * run_stride + kv_head) * page_tokens + there % page_tokens
            read = exists[:, None] & (column < DIM)[None, :]
            keys = tl.load(vectors + key[:, None] * DIM + column[None, :], mask=read, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            sees = exists[None, :] & (there[None, :] <= own[:, None])
            sees = sees & ((window == 0) | (there[None, :] > own[:, None] - window))
            scores = tl.where(sees, scores, float("-inf"))
            largest = tl.maximum(most, tl.max(scores, axis=1))
            # A query whose window has not begun yet has seen nothing: -inf less -inf is no number.
            base = tl.where(largest > float("-inf"), largest, 0.0)
            kept = tl.exp(most - base)
            weights = tl.exp(scores - base[:, None])
            value = key + KV_HEADS * page_tokens
            values = tl.load(vectors + value[:, None] * DIM + column[None, :], mask=read, other=0.0)
            sums = sums * kept[:, None] + tl.dot(weights, values, input_precision="ieee")
            total = total * kept + tl.sum(weights, axis=1)
            most = largest
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        place = token[:, None] * (KV_HEADS * GROUP * DIM) + head * DIM + column[None, :]
        tl.store(out + place, result, mask=inside)
