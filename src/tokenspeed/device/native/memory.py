"""Memory in large pages of the machine, where it has them: weights and KV are read end to end in every step."""

from __future__ import annotations

import mmap
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 64
LARGE_PAGE = 2 << 20


def zeroed_bytes(count: int) -> Bytes:
    """`count` zeros at the start of a memory page; memory is taken where it is written."""
    # One large page more, so that a large page that begins inside ends inside, too.
    mapped = mmap.mmap(-1, max(count, 1) + LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, dtype=np.uint8, count=count)


def zeroed_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` zeros of `dtype` in such memory."""
    with torch.inference_mode(mode=False):  # an ordinary tensor, which streams may write in any mode
        return torch.from_numpy(zeroed_bytes(count * dtype.itemsize)).view(dtype)


@attrs.define(eq=False)
class Arena:
    """Hands out pieces of large blocks one after the other; they live as long as any piece of theirs.

    Attributes:
        block_bytes: of one block; what is asked for at once may be more.
    """

    block_bytes: int = 32 << 20
    block: Bytes = attrs.field(factory=lambda: np.empty(0, dtype=np.uint8))

    def take(self, count: int) -> Bytes:
        """`count` zeros at an address that is a multiple of 64."""
        if count > len(self.block):
            self.block = zeroed_bytes(max(count, self.block_bytes))
        piece, rest = self.block[:count], -(-count // ALIGNMENT) * ALIGNMENT
        self.block = self.block[rest:]
        return piece
