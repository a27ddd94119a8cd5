"""The one call that runs a model: a range of layers over a ragged batch (the native step's interface).

Any implementation — torch, plain C, a captured graph — takes the same arguments, so that the
executor above it does not change when the implementation does. Called from the exec stream's
thread only: exactly one thread of the process may enter a parallel region.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import torch


class LayersReady(Protocol):
    """How many layers' KV have arrived for the blocks of this batch (RA-36).

    A load raises the counter layer by layer; the step waits on it before it reads a layer. With no
    load in the plan every layer is ready.
    """

    def wait_for(self, layer: int) -> None:
        """Return once KV of `layer` (0-based) is there; blocks without holding the GIL."""
        ...


@attrs.frozen(eq=False)
class AllReady:
    """No load is under way."""

    def wait_for(self, layer: int) -> None:
        return None


@attrs.frozen(kw_only=True, eq=False)
class RaggedRows:
    """`n` rows of one forward, `T` tokens in all; prefill chunks and decodes mixed in any order.

    Attributes:
        token_ids: int64 ``[T]``, resolved (no FROM_DEVICE left).
        positions: int64 ``[T]``, absolute position of each token in its sequence.
        offsets: int64 ``[n + 1]``, row i owns tokens ``offsets[i]:offsets[i + 1]``.
        contexts: int64 ``[n]``, tokens of the row's sequence once this step's KV is written.
        block_tables: int32 ``[n, max_blocks]``, pages of the row; entries beyond the context are 0.
        logit_tokens: int64 ``[m]``, indices into ``[0, T)`` whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    contexts: torch.Tensor
    block_tables: torch.Tensor
    logit_tokens: torch.Tensor


class ForwardStep(Protocol):
    """A loaded model bound to its KV pool."""

    @property
    def num_layers(self) -> int: ...

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute `layers` for `rows`, writing their KV into the pool.

        Args:
            layers: a contiguous range; starting at 0 embeds `token_ids`, otherwise `hidden` is the
                float32 ``[T, hidden]`` that the range before returned.
            ready: waited on before each layer's KV is read.
        Returns: float32 logits ``[m, vocab]`` if the range ends at the last layer, else the hidden
            state ``[T, hidden]``.
        """
        ...
