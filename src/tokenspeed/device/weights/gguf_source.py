"""Tensors of a GGUF file, dequantized by the `gguf` library."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

import attrs
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.gguf_header import GgufFile
from tokenspeed.device.weights.shapes import EMBEDDING, HEAD, NORM, Shape
from tokenspeed.errors import ModelError

_WHOLE: Mapping[str, str] = MappingProxyType(
    {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
)
_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
_POST_NORM_PARTS: Mapping[str, str] = MappingProxyType(
    {
        **_PARTS,
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
"""Read with the configuration (`RopeKind.FACTORS`)."""

_PAIRED_ARCHITECTURE = "llama"
"""Files of this architecture keep the rows of q and k in pairs; the converters of the others leave them in halves."""


@attrs.frozen(eq=False)
class GgufSource:
    """See `TensorSource`."""

    gguf: GgufFile
    config: ModelConfig

    @property
    def where(self) -> str:
        return str(self.gguf.path)

    @property
    def stored_as(self) -> str:
        return self.config.torch_dtype

    def called(self, name: str) -> str:
        if name in _WHOLE:
            return _WHOLE[name]
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        stem, kind = part.rsplit(".", 1)
        parts = _POST_NORM_PARTS if self.config.post_norms else _PARTS
        return f"blk.{layer}.{parts[stem]}.{kind}"

    def file_of(self, called: str) -> str:
        return self.where

    def shape(self, name: str) -> Shape | None:
        entry = self.gguf.tensors.get(self.called(name))
        return None if entry is None else entry.shape

    def unexpected(self, names: Collection[str]) -> list[str]:
        known = {self.called(name) for name in names} | _NOT_WEIGHTS
        return [name for name in self.gguf.tensors if name not in known]

    def read(self, name: str) -> torch.Tensor:
        entry = self.gguf.tensors[self.called(name)]
        raw = self.gguf.data(entry.name).reshape(math.prod(entry.shape[:-1]), -1)
        kind = GGMLQuantizationType(entry.ggml_type)
        try:
            values = dequantize(raw, kind)
        except NotImplementedError as fault:
            raise ModelError(
                f"{self.where}: tensor {entry.name} is stored as {kind.name}, which the gguf library"
                " cannot convert; use a file in another quantization"
            ) from fault
        tensor = torch.from_numpy(np.array(values, dtype=np.float32).reshape(entry.shape))
        if self.config.model_type == _PAIRED_ARCHITECTURE and ".self_attn.q_proj." in name:
            return halve_rows(tensor, self.config.num_heads)
        if self.config.model_type == _PAIRED_ARCHITECTURE and ".self_attn.k_proj." in name:
            return halve_rows(tensor, self.config.num_kv_heads)
        return tensor


def halve_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from pairs to halves; `layers.rope.pair_rows` is the way back."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).transpose(1, 2).reshape(weight.shape)
