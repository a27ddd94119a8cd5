"""The one call that runs a model: a range of layers over a ragged batch (the native step's interface).

Any implementation — torch, plain C, a captured graph — takes the same arguments, so that the
executor above it does not change when the implementation does. Called from the exec stream's
thread only: exactly one thread of the process may enter a parallel region.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from tokenspeed.errors import InvariantBroken


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
        block_tables: int32 ``[n, max_blocks]``, blocks of the row in cache group 0.
        more_tables: likewise of cache groups 1, 2, …

        Column j of an attention group's table is the block of the tokens ``j * block_tokens ..``; it is
        0 beyond the context, and in a window group where no query of this batch sees. A state group's
        table is ``[n, 1]``: the block with the state behind token ``contexts - counts - 1``, clean for
        a row that starts at 0, and to be left with the state behind the row's last token.
        logit_tokens: int64 ``[m]``, indices into ``[0, T)`` whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    contexts: torch.Tensor
    block_tables: torch.Tensor
    logit_tokens: torch.Tensor
    more_tables: tuple[torch.Tensor, ...] = ()

    @property
    def group_tables(self) -> tuple[torch.Tensor, ...]:
        """Of every cache group, by number."""
        return (self.block_tables, *self.more_tables)


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


def check_layers(layers: range, hidden: torch.Tensor | None, *, of: int) -> None:
    """What every `ForwardStep.run` checks of its arguments first.

    Raises: InvariantBroken: `layers` is not a range of a model of `of` layers, or `hidden` does not go with it.
    """
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= of:
        raise InvariantBroken("layers that are not a range of the model's", layers=layers, of=of)
    if (hidden is None) != (layers.start == 0):
        raise InvariantBroken("a hidden state is passed exactly when the first layer is not 0", layers=layers)
