"""The product in a gated feed-forward (Shazeer 2020, arXiv:2002.05202): SiLU, or GELU by its tanh formula."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `GateMulKernel`."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `GateMulKernel`."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width))
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        _gate_mul[grid](gate_up.contiguous(), out, WIDTH=width, GELU=gelu, BLOCK=BLOCK)
    return out


@triton.jit
def _gate_mul(gate_up, out, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token and BLOCK columns.

    gate_up: float32 [T, 2 * WIDTH], gate first. out: float32 [T, WIDTH]. grid: (T, ceil(WIDTH / BLOCK)).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0)
    if GELU:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        share = tl.sigmoid(twice)
    else:
        share = tl.sigmoid(gate)
    tl.store(out + token * WIDTH + column, gate * share * up, mask=inside)
