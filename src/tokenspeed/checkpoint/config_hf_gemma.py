"""``config.json`` of a Gemma 3 text model to :class:`ModelConfig`."""

from __future__ import annotations

import math

from tokenspeed.checkpoint.config import ARCHITECTURES, Activation, ModelConfig, RopeKind, RopeScaling
from tokenspeed.checkpoint.config_hf_parts import rope_of, scaling_of, stored_dtype
from tokenspeed.checkpoint.facts import Facts

GEMMA_TYPE = "gemma3_text"
"""The model type that this format gives the text models; ``gemma3`` is the one with images."""

_PATTERN = 6
"""Every sixth layer sees everything, unless the file says otherwise."""


def gemma_from_hf(facts: Facts) -> ModelConfig:
    """Defaults are those of the format.

    Raises: ModelError: names the key, its value and what is supported.
    """
    _refuse(facts)
    layers, hidden = facts.count("num_hidden_layers"), facts.count("hidden_size")
    heads = facts.count("num_attention_heads")
    kv_heads, head_dim = facts.count("num_key_value_heads", heads), facts.count("head_dim", 256)
    if heads % kv_heads:
        raise facts.fail("num_key_value_heads", kv_heads, f"it has to divide num_attention_heads, {heads}")
    if head_dim % 2:
        raise facts.fail("head_dim", head_dim, "rotary embedding needs an even number")
    positions = facts.count("max_position_embeddings", 131072)
    theta, scaling, window_theta = _ropes(facts, positions)
    if scaling is not None and scaling.kind is RopeKind.YARN:
        positions = max(positions, int(scaling.original_max_positions * scaling.factor))
    scalar = facts.number("query_pre_attn_scalar", 256)
    return ModelConfig(
        model_type="gemma3",
        architectures=(ARCHITECTURES["gemma3"],),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=facts.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=facts.count("vocab_size"),
        rms_eps=facts.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=positions,
        tie_embeddings=facts.flag("tie_word_embeddings", default=True),
        attention_bias=False,
        qk_norm=True,
        activation=Activation.GELU_TANH,
        post_norms=True,
        embedding_scale=math.sqrt(hidden),
        query_scale=None if scalar == head_dim else scalar**-0.5,
        sliding_window=facts.count("sliding_window"),
        window_layers=_window_layers(facts, layers),
        window_rope_theta=window_theta,
        torch_dtype=stored_dtype(facts),
    )


def _refuse(facts: Facts) -> None:
    for key in ("vision_config", "audio_config", "quantization_config"):
        if facts.get(key) is not None:
            raise facts.fail(key, facts.get(key), "only text models in float32, bfloat16 or float16 are supported")
    names = facts.get("architectures")
    if names is not None and (not isinstance(names, list) or ARCHITECTURES["gemma3"] not in names):
        raise facts.fail("architectures", names, f"for {GEMMA_TYPE} it has to be [{ARCHITECTURES['gemma3']!r}]")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if facts.get(key):
            raise facts.fail(key, facts.get(key), "capped logits are not supported")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if facts.get(key):
            raise facts.fail(key, facts.get(key), "only false is supported")
    act = facts.get("hidden_activation")
    if act not in (None, "gelu_pytorch_tanh"):
        raise facts.fail("hidden_activation", act, "only gelu_pytorch_tanh is supported")


def _window_layers(facts: Facts, layers: int) -> tuple[int, ...]:
    kinds = facts.get("layer_types")
    if kinds is None:
        old = facts.get("sliding_window_pattern")
        every = facts.count("_sliding_window_pattern" if old is None else "sliding_window_pattern", _PATTERN)
        return tuple(layer for layer in range(layers) if (layer + 1) % every)
    names = {"sliding_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not names.issuperset(map(str, kinds)):
        raise facts.fail("layer_types", kinds, f"{' or '.join(sorted(names))} for each of {layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _ropes(facts: Facts, positions: int) -> tuple[float, RopeScaling | None, float]:
    """Base and scaling of the full layers, base of the window layers; both spellings."""
    both = facts.get("rope_parameters")
    if both is None:
        old = facts if facts.get("rope_theta") is not None else _with(facts, "rope_theta", 1e6)
        theta, scaling = rope_of(old, positions)
        return theta, scaling, facts.number("rope_local_base_freq", 10000.0)
    inner = []
    for kind in ("full_attention", "sliding_attention"):
        one = both.get(kind) if isinstance(both, dict) else None
        if not isinstance(one, dict):
            raise facts.fail("rope_parameters", both, "an object with full_attention and sliding_attention is needed")
        prefix = f"rope_parameters.{kind}."
        inner.append(Facts(raw={prefix + key: value for key, value in one.items()}, where=facts.where, prefix=prefix))
    full, window = inner
    if window.get("rope_type") not in (None, "default"):
        raise window.fail("rope_type", window.get("rope_type"), "only default is supported in window layers")
    return full.number("rope_theta", 1e6), scaling_of(full, positions), window.number("rope_theta", 10000.0)


def _with(facts: Facts, key: str, value: object) -> Facts:
    return Facts(raw={**facts.raw, f"{facts.prefix}{key}": value}, where=facts.where, prefix=facts.prefix)
