"""Whole pages: copies as if every source were read first, and zeroing."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

BLOCK = 1024


def copy_pages(pages: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
    """See `CopyPagesKernel`. A source that is also a destination is set aside by a launch of its own before."""
    if not pairs:
        return
    rows = pages.flatten(1)
    written = {destination for _, destination in pairs}
    aside = sorted({source for source, _ in pairs} & written)
    direct = [pair for pair in pairs if pair[0] not in written]
    kept = rows.new_empty((len(aside), rows.shape[1]))
    numbers = {source: number for number, source in enumerate(aside)}
    _copy(rows, kept, list(enumerate(aside)), flip=True)
    _copy(rows, rows, direct, flip=False)
    _copy(kept, rows, [(numbers[source], to) for source, to in pairs if source in numbers], flip=False)


def zero_pages(pages: torch.Tensor, blocks: tuple[int, ...]) -> None:
    """See `ZeroPagesKernel`."""
    if blocks:
        rows = pages.flatten(1)
        grid = (len(blocks), triton.cdiv(rows.shape[1], BLOCK))
        _zero_rows[grid](rows, device_ints(blocks, pages.device), rows.stride(0), WIDTH=rows.shape[1], BLOCK=BLOCK)


def device_ints(values: Iterable[int], device: torch.device) -> torch.Tensor:
    """int64 on `device`, copied without blocking out of pinned memory where the device is not the host."""
    ints = torch.tensor(list(values), dtype=torch.int64)
    return ints if device.type == "cpu" else ints.pin_memory().to(device, non_blocking=True)


def _copy(source: torch.Tensor, into: torch.Tensor, pairs: list[tuple[int, int]], *, flip: bool) -> None:
    """Row ``pairs[i][0]`` of `source` to row ``pairs[i][1]`` of `into`; `flip`: the other way round."""
    if not pairs:
        return
    ordered = [(second, first) if flip else (first, second) for first, second in pairs]
    width, places = source.shape[1], device_ints((row for pair in ordered for row in pair), source.device)
    grid = (len(pairs), triton.cdiv(width, BLOCK))
    _copy_rows[grid](source, into, places, source.stride(0), into.stride(0), WIDTH=width, BLOCK=BLOCK)


@triton.jit
def _copy_rows(source, into, places, source_stride, into_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a pair and BLOCK numbers.

    source, into: float32 rows of WIDTH numbers. places: int64 [pairs, 2], from and to.
    grid: (pairs, ceil(WIDTH / BLOCK)).
    """
    pair = tl.program_id(0)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    row, to = tl.load(places + 2 * pair), tl.load(places + 2 * pair + 1)
    values = tl.load(source + row * source_stride + column, mask=inside, other=0.0)
    tl.store(into + to * into_stride + column, values, mask=inside)


@triton.jit
def _zero_rows(into, places, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """As `_copy_rows`, writing zeros; places: int64 [rows]."""
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(places + tl.program_id(0))
    tl.store(into + row * stride + column, tl.zeros([BLOCK], dtype=tl.float32), mask=column < WIDTH)
