"""What attention reads on a device that follows block tables itself: tables and contexts, no gathered pages."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(kw_only=True)
class PagedLayout:
    """How a layer's view of the pool is divided.

    Token t of page p and head h is row ``(p * run_stride + h) * page_tokens + t`` of ``[*, head_dim]``;
    heads below `kv_heads` are keys, the next `kv_heads` values.

    Attributes:
        window: tokens a query sees, itself included; 0: all before it.
    """

    page_tokens: int
    kv_heads: int
    run_stride: int
    window: int = 0


@attrs.frozen(kw_only=True, eq=False)
class PagedBatch:
    """`n` rows with `T` queries in all, as in `device.step.RaggedRows`, on the device of the pool.

    Attributes:
        tables: int32 ``[n, blocks]``, of the layer's cache group.
        offsets: int64 ``[n + 1]``.
        contexts: int64 ``[n]``; 0 for a padded row, which has one query and gets zeros.
    """

    tables: torch.Tensor
    offsets: torch.Tensor
    contexts: torch.Tensor
    layout: PagedLayout


def token_places(batch: PagedBatch, positions: torch.Tensor) -> torch.Tensor:
    """Where the keys and values of a batch's tokens go, without a look at any value on the host.

    Args:
        positions: int64 ``[T]``.
    Returns: int64 ``[T * 2 * kv_heads]``, see `KvWriteKernel`; -1 for tokens of padded rows.
    """
    layout = batch.layout
    tokens = torch.arange(len(positions), device=positions.device)
    rows = torch.searchsorted(batch.offsets, tokens, right=True) - 1
    column = positions // layout.page_tokens
    pages = batch.tables[rows, column].long()
    heads = torch.arange(2 * layout.kv_heads, device=positions.device)
    runs = (pages * layout.run_stride)[:, None] + heads
    places = runs * layout.page_tokens + (positions % layout.page_tokens)[:, None]
    return torch.where((batch.contexts[rows] > 0)[:, None], places, -1).reshape(-1)
