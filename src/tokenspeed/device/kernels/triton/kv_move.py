"""Keys and values into the pool and out of it, vector by vector (Kwon et al. 2023, arXiv:2309.06180, section 4)."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl


def kv_write(vectors: torch.Tensor, places: torch.Tensor, kv: torch.Tensor) -> None:
    """See `KvWriteKernel`."""
    tokens, heads, dim = kv.shape
    if tokens:
        _move[(tokens, heads)](
            kv, vectors, places, kv.stride(0), kv.stride(1), heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), OUT=True
        )


def kv_gather(vectors: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """See `KvGatherKernel`."""
    count, dim = len(places), vectors.shape[1]
    out = vectors.new_empty((count, dim))
    if count:
        _move[(count, 1)](out, vectors, places, dim, dim, 1, DIM=dim, BLOCK=triton.next_power_of_2(dim), OUT=False)
    return out


@triton.jit(do_not_specialize=["heads"])
def _move(
    rows, vectors, places, token_stride, head_stride, heads, DIM: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr
):
    """One program a vector, from `rows` to the pool (OUT) or back; a negative place is passed over.

    rows: float32 [T, heads, DIM], last stride 1. vectors: float32 [*, DIM]. places: int64 [T * heads].
    grid: (T, heads).
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + token * heads + head)
    column = tl.arange(0, BLOCK)
    inside = column < tl.where(place >= 0, DIM, 0)
    row = rows + token * token_stride + head * head_stride + column
    vector = vectors + place * DIM + column
    if OUT:
        tl.store(vector, tl.load(row, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(row, tl.load(vector, mask=inside, other=0.0), mask=inside)
