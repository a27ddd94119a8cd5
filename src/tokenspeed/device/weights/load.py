"""Read a checkpoint's tensors into the form the model computes with."""

from __future__ import annotations

import logging
from typing import assert_never

import attrs
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import NoProgress, Progress
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.device.layers.rope import pair_rows
from tokenspeed.device.weights.gguf_source import GgufSource
from tokenspeed.device.weights.overlay import OverlaidCheckpoint, OverlaySource
from tokenspeed.device.weights.random_source import RandomSource
from tokenspeed.device.weights.safetensors_source import open_safetensors
from tokenspeed.device.weights.shapes import (
    EMBEDDING,
    FLOAT32_BYTES,
    HEAD,
    NORM,
    mlp_norm_name,
    model_bytes,
    tensor_shapes,
)
from tokenspeed.device.weights.sources import TensorSource, check_tensors
from tokenspeed.errors import InvariantBroken, ModelError

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class Weights:
    """Tensors on their way into a model. Taking one hands it over, so that no two forms of all are in memory.

    Attributes:
        tensors: float32 by name. ``embedding``, ``norm`` and, unless tied, ``head``; for layer i
            ``i.attn_norm``, ``i.qkv`` (rows of q, k, v; q and k in pair order), ``i.qkv_bias`` and
            ``i.qk_norm`` (where the model has them), ``i.out``, ``i.mlp_norm``, ``i.gate_up``, ``i.down``;
            with post norms ``i.attn_post_norm`` and ``i.mlp_post_norm``. Layers with linear attention have,
            for the part up to ``i.out``, ``i.qkvz``, ``i.rates``, ``i.decay_log``, ``i.decay_bias`` and
            ``i.mixer_out_norm``.
        nbytes: what the bound model takes.
    """

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    nbytes: int

    def take(self, name: str) -> torch.Tensor:
        """Raises InvariantBroken: there is no such tensor, or it was taken before."""
        if name not in self.tensors:
            raise InvariantBroken("a weight that is not there, or was taken before", name=name)
        return self.tensors.pop(name)


def load_weights(checkpoint: Checkpoint, *, progress: Progress | None = None) -> Weights:
    """Read, convert to float32 and fuse; blocks on disk for seconds and uses one thread.

    Raises: ModelError: the configuration has a part that this model does not compute; tensors are
        missing, of an unexpected shape or format, or a file was cut short.
    """
    check_supported(checkpoint.config)
    source = open_source(checkpoint)
    shapes = tensor_shapes(checkpoint.config)
    check_tensors(source, shapes)
    if source.stored_as != "float32":
        log.info("weights: stored as %s, converted to float32", source.stored_as)
    reader = _Reader(source=source, progress=progress or NoProgress(), total=model_bytes(checkpoint.config))
    with torch.inference_mode():
        return Weights(
            config=checkpoint.config,
            tensors=_fused(reader, checkpoint.config),
            nbytes=model_bytes(checkpoint.config),
        )


def check_supported(config: ModelConfig) -> None:
    """Refuse what would be computed wrongly. Raises ModelError: names the option."""
    if config.sliding_window is not None and not (config.post_norms and config.window_layers):
        raise ModelError(
            f"sliding_window {config.sliding_window}: {config.model_type} with sliding-window attention is"
            " not supported"
        )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}")
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim}: rotary embedding needs an even number")


def open_source(checkpoint: Checkpoint) -> TensorSource:
    """The tensors of `checkpoint`, whatever its format."""
    if isinstance(checkpoint, OverlaidCheckpoint):
        return OverlaySource(base=open_source(checkpoint.base), checkpoint=checkpoint)
    match checkpoint.kind:
        case CheckpointKind.GGUF:
            if checkpoint.gguf is None:
                raise ModelError(f"{checkpoint.path}: opened without its tensor index")
            return GgufSource(checkpoint.gguf, checkpoint.config)
        case CheckpointKind.SAFETENSORS:
            return open_safetensors(checkpoint)
        case CheckpointKind.RANDOM:
            return RandomSource(checkpoint.seed, checkpoint.config)
        case other:
            assert_never(other)


@attrs.define(eq=False)
class _Reader:
    """Reads tensors and tells how far it is. Lives for one `load_weights`."""

    source: TensorSource
    progress: Progress
    total: int
    done: int = 0

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        self.done += tensor.numel() * FLOAT32_BYTES
        self.progress.step("weights", self.done, self.total)
        return tensor


def _fused(reader: _Reader, config: ModelConfig) -> dict[str, torch.Tensor]:
    tensors = {"embedding": reader.read(EMBEDDING)}
    for layer in range(config.num_layers):
        fused = _linear_layer if config.linear is not None and layer in config.linear.layers else _fused_layer
        parts = fused(reader, f"model.layers.{layer}", config)
        tensors.update({f"{layer}.{name}": tensor for name, tensor in parts.items()})
    tensors["norm"] = reader.read(NORM)
    if not config.tie_embeddings:
        tensors["head"] = reader.read(HEAD)
    reader.progress.step("weights", reader.total, reader.total)
    return tensors


def _fused_layer(reader: _Reader, prefix: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    def read(part: str) -> torch.Tensor:
        return reader.read(f"{prefix}.{part}")

    def qkv(kind: str) -> torch.Tensor:
        q = pair_rows(read(f"self_attn.q_proj.{kind}"), config.num_heads)
        k = pair_rows(read(f"self_attn.k_proj.{kind}"), config.num_kv_heads)
        return torch.cat((q, k, read(f"self_attn.v_proj.{kind}")))

    parts = {
        "attn_norm": read("input_layernorm.weight"),
        "qkv": qkv("weight"),
        "out": read("self_attn.o_proj.weight"),
        "mlp_norm": read(mlp_norm_name(config)),
        "gate_up": torch.cat((read("mlp.gate_proj.weight"), read("mlp.up_proj.weight"))),
        "down": read("mlp.down_proj.weight"),
    }
    if config.post_norms:
        parts["attn_post_norm"] = read("post_attention_layernorm.weight")
        parts["mlp_post_norm"] = read("post_feedforward_layernorm.weight")
    if config.attention_bias:
        parts["qkv_bias"] = qkv("bias")
    if config.qk_norm:
        q, k = (pair_rows(read(f"self_attn.{name}_norm.weight"), 1) for name in ("q", "k"))
        parts["qk_norm"] = torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))
    return parts


def _linear_layer(reader: _Reader, prefix: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    """A layer with linear attention in place of the other kind."""
    names = {
        "attn_norm": "input_layernorm.weight",
        "qkvz": "linear_attn.in_proj_qkvz.weight",
        "rates": "linear_attn.in_proj_ba.weight",
        "decay_log": "linear_attn.A_log",
        "decay_bias": "linear_attn.dt_bias",
        "mixer_out_norm": "linear_attn.norm.weight",
        "out": "linear_attn.out_proj.weight",
        "mlp_norm": mlp_norm_name(config),
        "down": "mlp.down_proj.weight",
    }
    parts = {name: reader.read(f"{prefix}.{part}") for name, part in names.items()}
    parts["gate_up"] = torch.cat([reader.read(f"{prefix}.mlp.{part}_proj.weight") for part in ("gate", "up")])
    return parts
