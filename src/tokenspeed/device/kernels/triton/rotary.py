"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), pairs next to each other, in place."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rotary(x: torch.Tensor, turns: torch.Tensor) -> None:
    """See `RotaryKernel`."""
    tokens, heads, dim = x.shape
    if not tokens:
        return
    pairs = dim // 2
    _rotary[(tokens, heads)](
        x,
        torch.view_as_real(turns).contiguous(),
        x.stride(0),
        x.stride(1),
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(pairs),
    )


@triton.jit
def _rotary(x, turns, token_stride, head_stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token and head.

    x: float32 [T, heads, 2 * PAIRS], last stride 1. turns: float32 [T, PAIRS, 2], cosine and sine.
    grid: (T, heads).
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    at = x + token * token_stride + tl.program_id(1) * head_stride + 2 * pair
    turn = turns + (token * PAIRS + pair) * 2
    real, imaginary = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
    cosine, sine = tl.load(turn, mask=inside, other=0.0), tl.load(turn + 1, mask=inside, other=0.0)
    tl.store(at, real * cosine - imaginary * sine, mask=inside)
    tl.store(at + 1, real * sine + imaginary * cosine, mask=inside)
