"""Tensors of a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import torch
from safetensors import SafetensorError, safe_open

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.open_hf import weight_index
from tokenspeed.device.weights.shapes import HEAD, Shape
from tokenspeed.errors import ModelError

_FLOATS: Mapping[str, str] = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
"""Endings of buffers that old checkpoints saved with the weights; they follow from the configuration."""


_NORMS_LESS_ONE = ("gemma3",)
"""Model types whose norms are stored as what they multiply by, less one."""


def stored_as_offset(config: ModelConfig, name: str) -> bool:
    """Whether files have of this tensor what it multiplies by, less one."""
    return config.model_type in _NORMS_LESS_ONE and name.endswith("norm.weight")


@attrs.frozen(kw_only=True)
class StoredTensor:
    """Where one tensor is, and how it is stored (`dtype` as the format names it: ``BF16``)."""

    file: Path
    shape: Shape
    dtype: str


@attrs.frozen(kw_only=True, eq=False)
class SafetensorsSource:
    """See `TensorSource`. Build it with `open_safetensors`.

    Attributes:
        index: the file that each tensor should be in, by the folder's own index; empty: it has none.
    """

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    index: Mapping[str, str]

    @property
    def where(self) -> str:
        return str(self.folder)

    @property
    def stored_as(self) -> str:
        kinds = sorted({_FLOATS.get(tensor.dtype, tensor.dtype) for tensor in self.tensors.values()})
        return ", ".join(kinds)

    def called(self, name: str) -> str:
        return name

    def file_of(self, called: str) -> str:
        stored = self.tensors.get(called)
        if stored is not None:
            return str(stored.file)
        return str(self.folder / self.index[called]) if called in self.index else self.where

    def shape(self, name: str) -> Shape | None:
        stored = self.tensors.get(name)
        return None if stored is None else stored.shape

    def unexpected(self, names: Collection[str]) -> list[str]:
        spare = {HEAD} if self.config.tie_embeddings else set[str]()
        return [
            name for name in self.tensors if name not in names and name not in spare and not name.endswith(_NOT_WEIGHTS)
        ]

    def read(self, name: str) -> torch.Tensor:
        stored = self.tensors[name]
        if stored.dtype not in _FLOATS:
            raise ModelError(
                f"{stored.file}: tensor {name} is stored as {stored.dtype}; supported are {', '.join(_FLOATS)}"
            )
        try:
            with safe_open(stored.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as fault:
            raise ModelError(f"{stored.file}: tensor {name} cannot be read: {fault}") from fault
        values = tensor.to(torch.float32, copy=True)
        return values.add_(1.0) if stored_as_offset(self.config, name) else values


def open_safetensors(checkpoint: Checkpoint) -> SafetensorsSource:
    """Read the headers of all files.

    Raises: ModelError: a file is missing, damaged or cut short, or two files have the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    for path in checkpoint.weight_files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    part = file.get_slice(name)
                    if name in found:
                        raise ModelError(f"{path}: tensor {name} is in {found[name].file.name} as well")
                    found[name] = StoredTensor(file=path, shape=tuple(part.get_shape()), dtype=part.get_dtype())
        except (OSError, SafetensorError) as fault:
            raise ModelError(
                f"{path}: not a usable safetensors file: {fault} (truncated or damaged; fetch it again)"
            ) from fault
    folder = checkpoint.path or Path()
    return SafetensorsSource(
        folder=folder, config=checkpoint.config, tensors=MappingProxyType(found), index=weight_index(folder)
    )
