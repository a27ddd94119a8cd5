"""A checkpoint's weights as panels, in one of the modes of `device.weights`."""

from __future__ import annotations

import logging
from typing import Protocol

import attrs
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.layers.rope import pair_rows
from tokenspeed.device.native.gguf_panels import GgufPanels
from tokenspeed.device.native.library import NativeLibrary
from tokenspeed.device.native.pack import PackedLinear, Packing, pack_floats
from tokenspeed.device.native.structs import Format
from tokenspeed.device.weights.gguf_source import GgufSource
from tokenspeed.device.weights.load import check_supported, open_source
from tokenspeed.device.weights.overlay import OverlaySource
from tokenspeed.device.weights.safetensors_source import SafetensorsSource
from tokenspeed.device.weights.shapes import EMBEDDING, HEAD, NORM, mlp_norm_name, tensor_shapes
from tokenspeed.device.weights.sources import TensorSource, check_tensors
from tokenspeed.settings.model import WeightsMode

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class NativeLayer:
    """One decoder layer; norms are float32, `qk_norm` ``[heads + kv_heads, head_dim]`` in pair order or None.

    Attributes:
        attn_post_norm, mlp_post_norm: of what attention and feed-forward add; None: it is added as it is.
    """

    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    attn_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    qk_norm: torch.Tensor | None
    q: PackedLinear
    k: PackedLinear
    v: PackedLinear
    o: PackedLinear
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)


@attrs.frozen(kw_only=True, eq=False)
class NativeWeights:
    """What a native step computes with. `head` is `embedding` where they are tied."""

    config: ModelConfig
    embedding: PackedLinear
    head: PackedLinear
    norm: torch.Tensor
    layers: tuple[NativeLayer, ...]

    @property
    def nbytes(self) -> int:
        tops = {id(linear): linear for linear in (self.embedding, self.head)}.values()
        return sum(linear.nbytes for linear in tops) + sum(
            linear.nbytes for layer in self.layers for linear in layer.linears
        )


class Packer(Protocol):
    """Turns one stored matrix into panels."""

    def __call__(self, name: str, heads: int | None) -> PackedLinear:
        """`heads`: the rows are those of so many heads, to be brought into pair order; None: they stay."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class FloatPacker:
    """Reads float32 and packs it to `format`; None: to the format it is stored in, if that loses nothing."""

    packing: Packing
    source: TensorSource
    format: Format | None

    def __call__(self, name: str, heads: int | None) -> PackedLinear:
        weight = self.source.read(name)
        if heads is not None:
            weight = pair_rows(weight, heads)
        return pack_floats(self.packing, weight, self._stored(name) if self.format is None else self.format)

    def _stored(self, name: str) -> Format:
        # What replaces a stored tensor is kept as the tensor was: the model's memory stays the same.
        source = self.source.base if isinstance(self.source, OverlaySource) else self.source
        if not isinstance(source, SafetensorsSource) or name not in source.tensors:
            return Format.F32
        return {"F16": Format.F16, "BF16": Format.BF16}.get(source.tensors[name].dtype, Format.F32)


def packer_for(library: NativeLibrary, source: TensorSource, mode: WeightsMode) -> Packer:
    """How `mode` packs the tensors of `source`."""
    packing = Packing(library=library)
    formats = {WeightsMode.NATIVE: None, WeightsMode.FP16: Format.F16, WeightsMode.INT8G32: Format.Q8M}
    kind = formats.get(mode, Format.F32)
    if isinstance(source, GgufSource):
        return GgufPanels(packing=packing, source=source, format=kind)
    return FloatPacker(packing=packing, source=source, format=kind)


def load_native(library: NativeLibrary, checkpoint: Checkpoint, mode: WeightsMode, progress: Progress) -> NativeWeights:
    """Read and pack, tensor by tensor, so that no two forms of all are in memory; one thread.

    Raises: ModelError: the configuration has a part that this model does not compute; tensors are
        missing, of an unexpected shape or format, or a file was cut short.
    """
    check_supported(checkpoint.config)
    source = open_source(checkpoint)
    shapes = tensor_shapes(checkpoint.config)
    check_tensors(source, shapes)
    with torch.inference_mode():
        reader = _Reader(source=source, pack=packer_for(library, source, mode), progress=progress, total=len(shapes))
        weights = reader.weights(checkpoint.config)
    log.info("weights: %s, %s MiB as %s", source.stored_as, f"{weights.nbytes / (1 << 20):,.1f}", mode.value)
    return weights


@attrs.define(eq=False)
class _Reader:
    """Reads one checkpoint and tells how far it is. Lives for one `load_native`."""

    source: TensorSource
    pack: Packer
    progress: Progress
    total: int
    done: int = 0

    def weights(self, config: ModelConfig) -> NativeWeights:
        embedding = self._linear(EMBEDDING)
        layers = tuple(self._layer(f"model.layers.{index}", config) for index in range(config.num_layers))
        return NativeWeights(
            config=config,
            embedding=embedding,
            layers=layers,
            norm=self._vector(NORM),
            head=embedding if config.tie_embeddings else self._linear(HEAD),
        )

    def _layer(self, prefix: str, config: ModelConfig) -> NativeLayer:
        def attention(part: str, heads: int | None) -> PackedLinear:
            linear = self._linear(f"{prefix}.self_attn.{part}_proj.weight", heads)
            if not config.attention_bias:
                return linear
            bias = self._vector(f"{prefix}.self_attn.{part}_proj.bias")
            return attrs.evolve(linear, bias=bias if heads is None else pair_rows(bias, heads))

        def post_norm(part: str) -> torch.Tensor | None:
            return self._vector(f"{prefix}.{part}.weight") if config.post_norms else None

        return NativeLayer(
            attn_norm=self._vector(f"{prefix}.input_layernorm.weight"),
            mlp_norm=self._vector(f"{prefix}.{mlp_norm_name(config)}"),
            attn_post_norm=post_norm("post_attention_layernorm"),
            mlp_post_norm=post_norm("post_feedforward_layernorm"),
            qk_norm=self._qk_norm(prefix, config) if config.qk_norm else None,
            q=attention("q", config.num_heads),
            k=attention("k", config.num_kv_heads),
            v=attention("v", None),
            o=self._linear(f"{prefix}.self_attn.o_proj.weight"),
            gate=self._linear(f"{prefix}.mlp.gate_proj.weight"),
            up=self._linear(f"{prefix}.mlp.up_proj.weight"),
            down=self._linear(f"{prefix}.mlp.down_proj.weight"),
        )

    def _qk_norm(self, prefix: str, config: ModelConfig) -> torch.Tensor:
        q, k = (pair_rows(self._vector(f"{prefix}.self_attn.{part}_norm.weight"), 1) for part in ("q", "k"))
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

    def _linear(self, name: str, heads: int | None = None) -> PackedLinear:
        linear = self.pack(name, heads)
        self._count()
        return linear

    def _vector(self, name: str) -> torch.Tensor:
        vector = self.source.read(name).contiguous()
        self._count()
        return vector

    def _count(self) -> None:
        self.done += 1
        self.progress.step("weights", self.done, self.total)
