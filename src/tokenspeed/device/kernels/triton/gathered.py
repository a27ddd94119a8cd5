"""Attention over pages that the host has listed and masked, as `AttentionKernel` has them.

Source: Dao et al. 2022 (FlashAttention, arXiv:2205.14135); nothing is gathered into scratch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed.device.kernels.triton.paged_decode import BLOCK_TOKENS, LEAST_DOT
from tokenspeed.device.kernels.triton.paged_prefill import TILE


def gathered_attention(
    q: torch.Tensor, runs: torch.Tensor, pages: torch.Tensor, mask: torch.Tensor, space: torch.Tensor
) -> torch.Tensor:
    """See `AttentionKernel`; `space` gives shapes only."""
    rows, heads, count, dim = q.shape
    kv_heads, padded = space.shape[2], space.shape[3]
    out = q.new_empty((rows, heads, count, dim))
    full = mask.expand(rows, heads, count, padded)
    _gathered[(rows * heads, triton.cdiv(count, TILE))](
        q,
        runs,
        pages,
        full,
        out,
        dim**-0.5,
        *q.stride()[:3],
        *full.stride(),
        rows,
        count,
        padded,
        runs.shape[1] // dim,
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_DIM=max(LEAST_DOT, triton.next_power_of_2(dim)),
        TILE=TILE,
        BLOCK=BLOCK_TOKENS,
    )
    return out


@triton.jit(
    do_not_specialize=[
        "q_row",
        "q_head",
        "q_query",
        "m_row",
        "m_head",
        "m_query",
        "m_token",
        "rows",
        "count",
        "padded",
        "page_tokens",
    ]
)
def _gathered(
    q,
    runs,
    pages,
    mask,
    out,
    scale,
    q_row,
    q_head,
    q_query,
    m_row,
    m_head,
    m_query,
    m_token,
    rows,
    count,
    padded,
    page_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and query head, and TILE queries.

    q: float32 [rows, HEADS, count, DIM], last stride 1. runs: float32 [*, page_tokens * DIM]. pages: int64
    [2, rows, HEADS / GROUP, padded / page_tokens]. mask: float32 [rows, HEADS, count, padded], any
    strides. out: float32 [rows, HEADS, count, DIM]. grid: (rows * HEADS, ceil(count / TILE)).
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    query, column, step = (
        tl.program_id(1) * TILE + tl.arange(0, TILE),
        tl.arange(0, BLOCK_DIM),
        tl.arange(0, BLOCK),
    )
    inside = (query < count)[:, None] & (column < DIM)[None, :]
    queries = tl.load(
        q + row * q_row + head * q_head + query[:, None] * q_query + column[None, :], mask=inside, other=0.0
    )
    blocks = padded // page_tokens
    key_pages = pages + (row * (HEADS // GROUP) + head // GROUP) * blocks
    value_pages = key_pages + rows * (HEADS // GROUP) * blocks
    most = tl.full([TILE], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE], dtype=tl.float32)
    sums = tl.zeros([TILE, BLOCK_DIM], dtype=tl.float32)
    for at in range(0, padded, BLOCK):
        there = at + step
        exists = there < padded
        read = exists[:, None] & (column < DIM)[None, :]
        key = tl.load(key_pages + there // page_tokens, mask=exists, other=0) * page_tokens + there % page_tokens
        keys = tl.load(runs + key[:, None] * DIM + column[None, :], mask=read, other=0.0)
        extra = tl.load(
            mask + row * m_row + head * m_head + query[:, None] * m_query + there[None, :] * m_token,
            mask=(query < count)[:, None] & exists[None, :],
            other=float("-inf"),
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale + extra
        largest = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(largest > float("-inf"), largest, 0.0)
        kept = tl.exp(most - base)
        weights = tl.exp(scores - base[:, None])
        value = tl.load(value_pages + there // page_tokens, mask=exists, other=0) * page_tokens + there % page_tokens
        values = tl.load(runs + value[:, None] * DIM + column[None, :], mask=read, other=0.0)
        sums = sums * kept[:, None] + tl.dot(weights, values, input_precision="ieee")
        total = total * kept + tl.sum(weights, axis=1)
        most = largest
    place = ((row * HEADS + head).to(tl.int64) * count + query[:, None]) * DIM + column[None, :]
    tl.store(out + place, sums / tl.where(total > 0.0, total, 1.0)[:, None], mask=inside)
