"""What a sampler is, and the log-probabilities a model gives, which no sampling rule changes."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array


@attrs.frozen(kw_only=True, eq=False)
class SampledTokens:
    """New tokens of `m` rows.

    Attributes:
        tokens: int64 ``[m]``, all in the vocabulary; 0 where `nan`.
        nan: bool ``[m]``: the row's logits were not numbers, or no token was left to choose.
    """

    tokens: torch.Tensor
    nan: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class TokenMasks:
    """Which tokens some of the rows may get, in host memory.

    Attributes:
        rows: int64 ``[k]``, rising: places among the rows to be sampled.
        words: int32 ``[k, (vocab + 31) // 32]``; bit ``t % 32`` of word ``t // 32`` is token t's.
    """

    rows: Int64Array
    words: Int32Array


class Sampler(Protocol):
    """Keeps what it must know of each slot's request, and of the tokens it drew. Exec stream's jobs only.

    One that brings logits to the host says so by an attribute ``samples_on_host = True``: the futures
    executor refuses it, since a step's tokens must stay on the device until the next step has them.
    """

    def seat(self, seat: Seat) -> None:
        """A new owner of ``seat.slot``; replaces what was known of the one before."""
        ...

    def release(self, slot: int) -> None:
        """Forget the slot's request; a slot that nobody has is ignored."""
        ...

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        """Draw one token a row, and remember it for rows whose sampling looks back.

        Args:
            logits: float32 ``[m, vocab]``; not written to.
            slots: int64 ``[m]``.
            positions: int64 ``[m]``, the position each new token will have in its sequence.
            masks: rows held by grammars; None: no row is.
        """
        ...


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax of raw logits: of `tokens`, and of the `top` likeliest tokens of each row.

    Args:
        logits: float32 ``[m, vocab]``.
        tokens: int64 ``[m]``.
        top: at most the vocabulary is returned.
    Returns: values float32 ``[m]``; ids int64 ``[m, top]``, best first; their values ``[m, top]``.
    """
    normed = torch.log_softmax(logits, dim=-1)
    values = normed.gather(1, tokens[:, None])[:, 0]
    best = normed.topk(min(top, normed.shape[1]), dim=-1)
    return values, best.indices, best.values
