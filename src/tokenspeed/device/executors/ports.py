"""What an executor needs from model and sampler; called inside jobs of the exec stream only."""

from __future__ import annotations

from typing import Protocol

import torch

from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array


class BlockPool(Protocol):
    """The KV pool, as far as blocks are moved without looking into them."""

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """(source, destination) pairs, as if all sources were read before the first write."""
        ...

    def zero_blocks(self, blocks: tuple[int, ...]) -> None: ...


class Sampled(Protocol):
    """New tokens of `m` rows."""

    @property
    def tokens(self) -> torch.Tensor:
        """int64 ``[m]``."""
        ...

    @property
    def nan(self) -> torch.Tensor:
        """bool ``[m]``: the row's logits were not numbers."""
        ...


class TokenSampler(Protocol):
    """Logits to tokens; keeps what it must know of each slot's request, and of the tokens it drew."""

    def seat(self, seat: Seat) -> None:
        """A new owner of ``seat.slot``; replaces what was known of the one before."""
        ...

    def release(self, slot: int) -> None: ...

    def sample(self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array) -> Sampled:
        """Draw one token a row.

        Args:
            logits: float32 ``[m, vocab]``; not written to.
            slots: int64 ``[m]``.
            positions: int64 ``[m]``, the position each new token will have in its sequence.
        """
        ...


class Logprobs(Protocol):
    """Log-probabilities under the model itself: log-softmax of raw logits, before any sampling rule."""

    def __call__(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of `tokens` (int64 ``[m]``), and of the `top` likeliest tokens of each row.

        Returns: values float32 ``[m]``; ids int64 ``[m, top]``, best first; their values ``[m, top]``.
        """
        ...
