"""GGUF tensors as panels that keep the file's own quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Ggml

from tokenspeed.device.layers.rope import pair_rows
from tokenspeed.device.native.gguf_levels import levels_of
from tokenspeed.device.native.memory import Arena, Bytes
from tokenspeed.device.native.pack import PackedLinear, Packing, pack_blocks, pack_floats, pack_levels, repack
from tokenspeed.device.native.structs import Format
from tokenspeed.device.weights.gguf_source import GgufSource

_AS_STORED = (Ggml.Q4_0, Ggml.Q4_1, Ggml.Q8_0)
_FLOATS: Mapping[Ggml, Format] = MappingProxyType({Ggml.F16: Format.F16, Ggml.BF16: Format.BF16})
_PAIRED_MODELS = ("llama",)
"""Model types whose files keep q and k in pair order already, see `weights.gguf_source`."""


@attrs.frozen(kw_only=True, eq=False)
class GgufPanels:
    """`native.weights.Packer` over a GGUF file.

    Attributes:
        format: what to turn the weights into; None: as the file has them, and float32 for types that
            have no quantized kernel.
    """

    packing: Packing
    source: GgufSource
    format: Format | None

    def __call__(self, name: str, heads: int | None) -> PackedLinear:
        if self.format is None:
            return self._as_stored(name, heads, self.packing)
        # In blocks of their own, which go when the panels in the wanted format are there.
        stored = self._as_stored(name, heads, Packing(library=self.packing.library, arena=Arena(block_bytes=0)))
        if self.format is Format.Q8M and stored.format is Format.Q8:
            return self._as_stored(name, heads, self.packing)  # eight bits in groups of 32 already
        return repack(self.packing, stored, self.format)

    def _as_stored(self, name: str, heads: int | None, packing: Packing) -> PackedLinear:
        entry = self.source.gguf.tensors[self.source.called(name)]
        kind, (out_features, in_features) = Ggml(entry.ggml_type), entry.shape
        if kind in _AS_STORED:
            return pack_blocks(packing, self._rows(name, heads), (out_features, in_features), int(kind))
        levels = levels_of(kind, self._rows(name, heads))
        if levels is not None:
            return pack_levels(packing, levels)
        weight = self.source.read(name)
        if heads is not None:
            weight = pair_rows(weight, heads)
        return pack_floats(packing, weight, _FLOATS.get(kind, Format.F32))

    def _rows(self, name: str, heads: int | None) -> Bytes:
        """The stored bytes, uint8 ``[out, bytes of a row]``; rows of q and k in pair order."""
        entry = self.source.gguf.tensors[self.source.called(name)]
        rows = self.source.gguf.data(entry.name).reshape(entry.shape[0], -1)
        if heads is None or self.source.config.model_type in _PAIRED_MODELS:
            return rows
        order = pair_rows(torch.arange(len(rows))[:, None], heads)
        return np.take(rows, order[:, 0].numpy(), axis=0)
