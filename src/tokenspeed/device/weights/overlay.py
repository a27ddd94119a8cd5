"""A checkpoint some of whose tensors were replaced by others that came without a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.device.weights.safetensors_source import stored_as_offset
from tokenspeed.device.weights.shapes import HEAD, Shape
from tokenspeed.device.weights.sources import TensorSource


@attrs.frozen(kw_only=True, eq=False)
class OverlaidCheckpoint(Checkpoint):
    """`base` with `tensors` in place of its own, under the names of safetensors files.

    The tensors are kept for as long as they are in force: weights that memory was released of come back
    from the files of `base` and from here.
    """

    base: Checkpoint
    tensors: Mapping[str, torch.Tensor] = attrs.field(repr=False)


def overlaid(base: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> OverlaidCheckpoint:
    fields = {field.name: getattr(base, field.name) for field in attrs.fields(Checkpoint)}
    return OverlaidCheckpoint(**fields, base=base, tensors=tensors)


@attrs.frozen(kw_only=True, eq=False)
class OverlaySource:
    """See `TensorSource`."""

    base: TensorSource
    checkpoint: OverlaidCheckpoint

    @property
    def where(self) -> str:
        return f"{len(self.checkpoint.tensors)} tensors over {self.base.where}"

    @property
    def stored_as(self) -> str:
        return self.base.stored_as

    def called(self, name: str) -> str:
        return name

    def file_of(self, called: str) -> str:
        return self.where if called in self.checkpoint.tensors else self.base.file_of(called)

    def shape(self, name: str) -> Shape | None:
        tensor = self.checkpoint.tensors.get(name)
        return self.base.shape(name) if tensor is None else tuple(tensor.shape)

    def unexpected(self, names: Collection[str]) -> list[str]:
        spare = {HEAD} if self.checkpoint.config.tie_embeddings else set[str]()
        return [name for name in self.checkpoint.tensors if name not in names and name not in spare]

    def read(self, name: str) -> torch.Tensor:
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            return self.base.read(name)
        values = tensor.to(torch.float32, copy=True)
        return values.add_(1.0) if stored_as_offset(self.checkpoint.config, name) else values
