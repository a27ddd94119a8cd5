"""Root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467), and with ``1 + weight`` as Gemma has it."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `RmsNormKernel`."""
    return _launch(x, weight, eps, plus=0.0)


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Likewise by ``1 + weight``."""
    return _launch(x, weight, eps, plus=1.0)


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus: float) -> torch.Tensor:
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    out = torch.empty_like(rows)
    if len(rows):
        _rms_norm[(len(rows),)](rows, weight, out, eps, plus, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out.view(x.shape)


@triton.jit
def _rms_norm(x, weight, out, eps, plus, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row.

    x, out: float32 [rows, WIDTH]. weight: float32 [WIDTH]. grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    factors = tl.load(weight + column, mask=inside, other=0.0) + plus
    tl.store(out + row * WIDTH + column, values * scale * factors, mask=inside)
