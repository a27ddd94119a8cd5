"""Attention by block tables, gathering and sampling in terms of torch; the reference for other implementations.

Written for reading: rows are taken one by one.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenspeed.device.kernels.paged import PagedBatch


def kv_gather(vectors: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return vectors.index_select(0, places)


def ragged_attention(q: torch.Tensor, vectors: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    out = q.new_zeros(q.shape)
    offsets, contexts = batch.offsets.tolist(), batch.contexts.tolist()
    for row, context in enumerate(contexts):
        first, last = offsets[row], offsets[row + 1]
        if context:
            out[first:last] = _row(q[first:last], vectors, batch.tables[row], context, batch)
    return out


def _row(q: torch.Tensor, vectors: torch.Tensor, table: torch.Tensor, context: int, batch: PagedBatch) -> torch.Tensor:
    """`q` float32 ``[n, heads, head_dim]``, the last n tokens of `context`; result alike."""
    layout, count = batch.layout, len(q)
    own = torch.arange(context - count, context)[:, None]
    first = max(context - count - layout.window + 1, 0) if layout.window else 0  # behind it nothing is ours
    there = torch.arange(first, context)
    pages = table[there // layout.page_tokens].long()
    heads = torch.arange(2 * layout.kv_heads)[:, None]
    places = (pages * layout.run_stride + heads) * layout.page_tokens + there % layout.page_tokens
    keys, values = kv_gather(vectors, places.reshape(-1)).view(2, layout.kv_heads, len(there), -1)
    sees = there <= own
    if layout.window:
        sees &= there > own - layout.window
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=sees, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)
