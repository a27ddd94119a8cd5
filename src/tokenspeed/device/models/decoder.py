"""The walk over a decoder's layers: what the models of this room share of `device.step.ForwardStep.run`."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from tokenspeed.device.kernels.linear import Linear
from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.device.step import LayersReady, RaggedRows, check_layers

B = TypeVar("B")


class Decoder(Protocol[B]):
    """A model's own parts; `B` is what its layers need to know of a batch.

    Attributes:
        norm: float32 ``[hidden]``, of the last hidden state.
        head: hidden to ``[vocab]``.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def norm(self) -> torch.Tensor: ...

    @property
    def head(self) -> Linear: ...

    @property
    def rms_eps(self) -> float: ...

    @property
    def kernels(self) -> Kernels: ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 ``[T, hidden]`` of int64 ``[T]``; a new tensor."""
        ...

    def begin(self, rows: RaggedRows, layers: range) -> B:
        """Plan the batch, and clear the pages that `layers` begin to fill."""
        ...

    def layer(self, index: int, hidden: torch.Tensor, batch: B) -> torch.Tensor:
        """One layer, its keys and values written; float32 ``[T, hidden]``."""
        ...


@torch.inference_mode()
def run_decoder(
    model: Decoder[B], rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None
) -> torch.Tensor:
    """See `ForwardStep.run`.

    Raises: InvariantBroken: `layers` is not a range of the model's, or `hidden` does not go with it.
    """
    check_layers(layers, hidden, of=model.num_layers)
    if hidden is None:
        hidden = model.embed(rows.token_ids)
    batch = model.begin(rows, layers)
    for index in layers:
        ready.wait_for(index)
        hidden = model.layer(index, hidden, batch)
    if layers.stop < model.num_layers:
        return hidden
    wanted = hidden.index_select(0, rows.logit_tokens)
    return model.head(model.kernels.rms_norm(wanted, model.norm, model.rms_eps))
