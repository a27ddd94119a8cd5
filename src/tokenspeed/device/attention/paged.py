"""Attention of one layer over a planned batch."""

from __future__ import annotations

import torch

from tokenspeed.device.attention.batch import AttentionBatch, PagedRows
from tokenspeed.device.kernels.registry import Kernels


def attend(
    qkv: torch.Tensor, runs: torch.Tensor, batch: AttentionBatch, *, heads: int, kv_heads: int, kernels: Kernels
) -> torch.Tensor:
    """Attention of all rows; the chunk's own keys and values are in the pool already.

    Args:
        qkv: float32 ``[T, heads + 2 * kv_heads, head_dim]``, rotated.
        runs: the layer's view of the pool.
    Returns: float32 ``[T, heads * head_dim]``.
    """
    tokens, _, dim = qkv.shape
    if batch.by_tables is not None:
        # Every row has a query, so that as many tokens as rows means one each.
        one_each = tokens == len(batch.by_tables.contexts)
        kernel = kernels.paged_decode if one_each else kernels.paged_prefill
        return kernel(qkv[:, :heads], runs.view(-1, dim), batch.by_tables).reshape(tokens, heads * dim)
    if len(batch.paged) == 1 and batch.paged[0].tokens is None:
        return _paged(qkv[:, :heads], runs, batch.paged[0], kernels).reshape(tokens, heads * dim)
    out = qkv.new_empty((tokens, heads, dim))
    for group in batch.paged:
        if group.tokens is not None:
            q = qkv.index_select(0, group.tokens)[:, :heads]
            out.index_copy_(0, group.tokens, _paged(q, runs, group, kernels))
    for row in batch.fresh:
        out[row.first : row.last] = _fresh(qkv[row.first : row.last], heads, kv_heads, kernels)
    return out.view(tokens, heads * dim)


def _paged(q: torch.Tensor, runs: torch.Tensor, group: PagedRows, kernels: Kernels) -> torch.Tensor:
    """`q` float32 ``[R * n, heads, head_dim]``, result alike."""
    heads, dim = q.shape[1:]
    kernel = kernels.decode_attention if group.decode else kernels.prefill_attention
    by_row = q.view(group.rows, -1, heads, dim).transpose(1, 2)
    return kernel(by_row, runs, group.pages, group.mask, group.space).transpose(1, 2).reshape(-1, heads, dim)


def _fresh(qkv: torch.Tensor, heads: int, kv_heads: int, kernels: Kernels) -> torch.Tensor:
    by_head = qkv.transpose(0, 1)[None]
    q, k, v = by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]
    return kernels.fresh_attention(q, k, v)[0].transpose(0, 1)
