"""Every kernel in terms of torch; the reference for the others."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), 1.0 + weight, eps)


def rotary(x: torch.Tensor, turns: torch.Tensor) -> None:
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(turns)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def kv_write(vectors: torch.Tensor, places: torch.Tensor, kv: torch.Tensor) -> None:
    vectors.index_copy_(0, places, kv.reshape(-1, kv.shape[-1]))


def paged_attention(
    q: torch.Tensor, runs: torch.Tensor, pages: torch.Tensor, mask: torch.Tensor, space: torch.Tensor
) -> torch.Tensor:
    """Gather each row's pages next to each other, then one padded attention (Kwon et al. 2023, section 4)."""
    torch.index_select(runs, 0, pages, out=space.view(len(pages), runs.shape[1]))
    return functional.scaled_dot_product_attention(q, space[0], space[1], attn_mask=mask, enable_gqa=True)


def fresh_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def copy_pages(pages: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
    """A source that is also a destination is set aside before anything is written; the rest is copied directly."""
    written = {destination for _, destination in pairs}
    aside = {source: pages[source].clone() for source, _ in pairs if source in written}
    for source, destination in pairs:
        pages[destination].copy_(aside[source] if source in aside else pages[source])


def zero_pages(pages: torch.Tensor, blocks: tuple[int, ...]) -> None:
    for block in blocks:
        pages[block].zero_()
