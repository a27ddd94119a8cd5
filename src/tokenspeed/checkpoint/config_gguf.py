"""Metadata of a GGUF file to :class:`ModelConfig`."""

from __future__ import annotations

from collections import Counter

import numpy as np
from gguf.constants import GGMLQuantizationType

from tokenspeed.checkpoint.config import ARCHITECTURES, ModelConfig, RopeKind, RopeScaling, yarn_mscale
from tokenspeed.checkpoint.facts import Facts
from tokenspeed.checkpoint.gguf_header import GgufFile
from tokenspeed.errors import ModelError


def config_from_gguf(gguf: GgufFile) -> ModelConfig:
    """Read the shape of the model from metadata, and from the tensor index what metadata leaves out.

    Raises: ModelError: names the file, the key, its value and what is supported.
    """
    arch = _architecture(gguf)
    facts = Facts(raw=gguf.metadata, where=str(gguf.path), prefix=f"{arch}.")
    _refuse(facts)
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise facts.fail("attention.head_count_kv", kv_heads, f"it has to divide the head count, {heads}")
    head_dim = facts.count("attention.key_length", hidden // heads)
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
        rope_theta=facts.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        max_positions=positions,
        tie_embeddings="output.weight" not in gguf.tensors,
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
        torch_dtype=_main_type(gguf),
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


def _refuse(facts: Facts) -> None:
    experts = facts.get("expert_count")
    if experts:
        raise facts.fail("expert_count", experts, "mixture-of-experts models are not supported")
    window = facts.get("attention.sliding_window")
    if window:
        raise facts.fail("attention.sliding_window", window, "sliding-window attention is not supported")


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
