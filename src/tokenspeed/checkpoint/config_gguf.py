"""Metadata of a GGUF file to :class:`ModelConfig`."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypedDict

import numpy as np
from gguf.constants import GGMLQuantizationType

from tokenspeed.checkpoint.config import (
    ARCHITECTURES,
    Activation,
    ModelConfig,
    RopeKind,
    RopeScaling,
    yarn_mscale,
)
from tokenspeed.checkpoint.facts import Facts
from tokenspeed.checkpoint.gguf_header import GgufFile
from tokenspeed.errors import ModelError

_GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 sees everything; files may say otherwise."""

_GEMMA_WINDOW_THETA = 10000.0
"""Rotary base of Gemma 3's window layers where the file does not say it."""

_GEMMA_27B_LAYERS = 62
"""The one size whose scores are scaled by the hidden size a head; files do not say it.

Source: query_pre_attn_scalar in the released configurations; arXiv:2503.19786.
"""


def config_from_gguf(gguf: GgufFile) -> ModelConfig:
    """Read the shape of the model from metadata, and from the tensor index what metadata leaves out.

    Raises: ModelError: names the file, the key, its value and what is supported.
    """
    arch = _architecture(gguf)
    facts = Facts(raw=gguf.metadata, where=str(gguf.path), prefix=f"{arch}.")
    _refuse(facts, arch)
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise facts.fail("attention.head_count_kv", kv_heads, f"it has to divide the head count, {heads}")
    head_dim = facts.count("attention.key_length", 256 if arch == "gemma3" else hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.count(key, head_dim) != head_dim:
            raise facts.fail(key, facts.get(key), f"only the head dimension, {head_dim}, is supported")
    if head_dim % 2:
        raise facts.fail("attention.key_length", head_dim, "rotary embedding needs an even number")
    positions = facts.count("context_length")
    scaling = _scaling(facts, gguf, positions, head_dim)
    if scaling is not None and scaling.kind is RopeKind.YARN:
        positions = max(positions, int(scaling.original_max_positions * scaling.factor))
    return ModelConfig(
        model_type=arch,
        architectures=(ARCHITECTURES[arch],),
        num_layers=facts.count("block_count"),
        hidden_size=hidden,
        intermediate_size=facts.count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(gguf),
        rms_eps=facts.number("attention.layer_norm_rms_epsilon"),
        rope_theta=facts.number("rope.freq_base", 1e6 if arch == "gemma3" else 10000.0),
        rope_scaling=scaling,
        max_positions=positions,
        tie_embeddings="output.weight" not in gguf.tensors,
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
        torch_dtype=_main_type(gguf),
        **(_gemma(facts, hidden, heads) if arch == "gemma3" else {}),
    )


class _GemmaFields(TypedDict, total=False):
    activation: Activation
    post_norms: bool
    embedding_scale: float
    query_scale: float | None
    sliding_window: int
    window_layers: tuple[int, ...]
    window_rope_theta: float


def _gemma(facts: Facts, hidden: int, heads: int) -> _GemmaFields:
    """What a Gemma 3 file adds, of which it says the window and, in newer files, pattern and second base."""
    layers, pattern = facts.count("block_count"), facts.get("attention.sliding_window_pattern")
    if isinstance(pattern, (tuple, list)):
        if len(pattern) != layers or any(type(one) is not bool for one in pattern):
            raise facts.fail("attention.sliding_window_pattern", pattern, f"true or false for each of {layers} layers")
        window_layers = tuple(layer for layer, windowed in enumerate(pattern) if windowed)
    else:
        every = facts.count("attention.sliding_window_pattern", _GEMMA_PATTERN)
        window_layers = tuple(layer for layer in range(layers) if (layer + 1) % every)
    return _GemmaFields(
        activation=Activation.GELU_TANH,
        post_norms=True,
        embedding_scale=math.sqrt(hidden),
        query_scale=(hidden / heads) ** -0.5 if layers == _GEMMA_27B_LAYERS else None,
        sliding_window=facts.count("attention.sliding_window"),
        window_layers=window_layers,
        window_rope_theta=facts.number("rope.freq_base_swa", _GEMMA_WINDOW_THETA),
    )


def _architecture(gguf: GgufFile) -> str:
    facts = Facts(raw=gguf.metadata, where=str(gguf.path))
    arch = facts.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        supported = f"supported are {', '.join(ARCHITECTURES)} (dense, text only)"
        raise facts.fail("general.architecture", arch, supported)
    kind = facts.get("general.type")
    if kind not in (None, "model"):
        raise facts.fail("general.type", kind, "only whole models are supported")
    parts = facts.get("split.count")
    if parts not in (None, 0, 1):
        raise facts.fail("split.count", parts, "one of several part files; merge them first (llama-gguf-split --merge)")
    return arch


def _refuse(facts: Facts, arch: str) -> None:
    experts = facts.get("expert_count")
    if experts:
        raise facts.fail("expert_count", experts, "mixture-of-experts models are not supported")
    window = facts.get("attention.sliding_window")
    if window and arch != "gemma3":
        raise facts.fail("attention.sliding_window", window, f"{arch} with sliding-window attention is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if facts.get(key):
            raise facts.fail(key, facts.get(key), "capped logits are not supported")


def _vocab_size(gguf: GgufFile) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path}: tensor token_embd.weight is missing or is not a matrix")
    return embedding.shape[0]


def _main_type(gguf: GgufFile) -> str:
    sizes: Counter[str] = Counter()
    for entry in gguf.tensors.values():
        sizes[entry.type_name] += entry.nbytes
    return sizes.most_common(1)[0][0]


def _scaling(facts: Facts, gguf: GgufFile, positions: int, head_dim: int) -> RopeScaling | None:
    kind = facts.get("rope.scaling.type")
    if kind is None and facts.get("rope.scale_linear") is not None:  # how older files say linear
        return RopeScaling(kind=RopeKind.LINEAR, factor=facts.number("rope.scale_linear"))
    if kind in (None, "none"):
        return _frequency_factors(gguf, head_dim)
    if "rope_freqs.weight" in gguf.tensors:
        raise facts.fail("rope.scaling.type", kind, "together with a rope_freqs tensor it is not supported")
    factor = facts.number("rope.scaling.factor")
    if kind == "linear":
        return RopeScaling(kind=RopeKind.LINEAR, factor=factor)
    if kind != "yarn":
        raise facts.fail("rope.scaling.type", kind, "supported are none, linear and yarn")
    return RopeScaling(
        kind=RopeKind.YARN,
        factor=factor,
        original_max_positions=facts.count("rope.scaling.original_context_length", positions),
        beta_fast=facts.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=facts.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=facts.number("rope.scaling.attn_factor", 1.0) * yarn_mscale(factor),
    )


def _frequency_factors(gguf: GgufFile, head_dim: int) -> RopeScaling | None:
    """The ``rope_freqs.weight`` tensor, if the file has one."""
    entry = gguf.tensors.get("rope_freqs.weight")
    if entry is None:
        return None
    if entry.ggml_type != GGMLQuantizationType.F32 or entry.shape != (head_dim // 2,):
        raise ModelError(
            f"{gguf.path}: rope_freqs.weight is {entry.type_name} {list(entry.shape)}; F32 [{head_dim // 2}] is needed"
        )
    factors = np.frombuffer(gguf.data(entry.name), dtype="<f4")
    if not bool(np.all(np.isfinite(factors) & (factors > 0))):
        raise ModelError(f"{gguf.path}: rope_freqs.weight holds values that are not positive numbers")
    if bool(np.all(factors == 1)):
        return None
    return RopeScaling(kind=RopeKind.FACTORS, frequency_factors=tuple(factors.tolist()))
