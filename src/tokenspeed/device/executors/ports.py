"""What an executor needs beside step and sampler; called inside jobs of the exec stream only."""

from __future__ import annotations

from typing import Protocol

import torch


class BlockPool(Protocol):
    """The KV pool, as far as blocks are moved without looking into them."""

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """(source, destination) pairs, as if all sources were read before the first write."""
        ...

    def zero_blocks(self, blocks: tuple[int, ...]) -> None: ...


class Logprobs(Protocol):
    """Log-probabilities under the model itself: log-softmax of raw logits, before any sampling rule."""

    def __call__(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of `tokens` (int64 ``[m]``), and of the `top` likeliest tokens of each row.

        Returns: values float32 ``[m]``; ids int64 ``[m, top]``, best first; their values ``[m, top]``.
        """
        ...
