"""``config.json`` of a Hugging Face checkpoint to :class:`ModelConfig`."""

from __future__ import annotations

from types import MappingProxyType

import attrs

from tokenspeed.checkpoint.config import ARCHITECTURES, ModelConfig, RopeKind, RopeScaling, yarn_mscale
from tokenspeed.checkpoint.facts import Facts, JsonObject

_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_POSITIONS = MappingProxyType({"llama": 2048, "qwen2": 32768, "qwen3": 32768})
"""The families read in this format, and what a missing ``max_position_embeddings`` means in each."""


def config_from_hf(raw: JsonObject, where: str = "config.json") -> ModelConfig:
    """Read the keys this build acts on and refuse those that would change the mathematics.

    Args:
        raw: the parsed file.
        where: its name, for messages.
    Raises: ModelError: names the key, its value and what is supported.
    """
    facts = Facts(raw=raw, where=where)
    model_type = _family(facts)
    _refuse(facts, model_type)
    hidden, heads = facts.count("hidden_size"), facts.count("num_attention_heads")
    kv_heads = facts.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise facts.fail("num_key_value_heads", kv_heads, f"it has to divide num_attention_heads, {heads}")
    positions = facts.count("max_position_embeddings", _DEFAULT_POSITIONS[model_type])
    theta, scaling = _rope(facts, positions)
    if scaling is not None and scaling.kind is RopeKind.YARN:
        positions = max(positions, int(scaling.original_max_positions * scaling.factor))
    return ModelConfig(
        model_type=model_type,
        architectures=(ARCHITECTURES[model_type],),
        num_layers=facts.count("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=facts.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(facts, model_type, hidden, heads),
        vocab_size=facts.count("vocab_size"),
        rms_eps=facts.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=positions,
        tie_embeddings=facts.flag("tie_word_embeddings", default=False),
        attention_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        torch_dtype=_dtype(facts),
    )


def _family(facts: Facts) -> str:
    supported = f"supported are {', '.join(_DEFAULT_POSITIONS)} (dense, text only), and gemma3 as a GGUF file"
    for key in ("vision_config", "audio_config", "text_config", "thinker_config"):
        if facts.get(key) is not None:
            raise facts.fail(key, facts.get(key), f"models with images or sound are not supported; {supported}")
    model_type = facts.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULT_POSITIONS:
        raise facts.fail("model_type", model_type, supported)
    names = facts.get("architectures")
    if names is not None and (not isinstance(names, list) or ARCHITECTURES[model_type] not in names):
        raise facts.fail("architectures", names, f"for {model_type} it has to be [{ARCHITECTURES[model_type]!r}]")
    return model_type


def _head_dim(facts: Facts, model_type: str, hidden: int, heads: int) -> int:
    if facts.get("head_dim") is None and model_type != "qwen3" and hidden % heads:
        raise facts.fail("hidden_size", hidden, f"without head_dim it has to be a multiple of {heads} heads")
    head_dim = facts.count("head_dim", 128 if model_type == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise facts.fail("head_dim", head_dim, "rotary embedding needs an even number")
    return head_dim


def _refuse(facts: Facts, model_type: str) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if facts.get(key):
            raise facts.fail(key, facts.get(key), "mixture-of-experts models are not supported")
    quantized = facts.get("quantization_config")
    if quantized is not None:
        raise facts.fail(
            "quantization_config",
            quantized,
            "safetensors in float32, bfloat16 or float16 are supported, or a GGUF file",
        )
    act = facts.get("hidden_act")
    if act not in (None, "silu"):
        raise facts.fail("hidden_act", act, "only silu is supported")
    if facts.flag("attention_bias", default=False) and model_type != "qwen2":
        raise facts.fail("attention_bias", True, f"{model_type} with biases in attention is not supported")
    if facts.flag("mlp_bias", default=False):
        raise facts.fail("mlp_bias", True, "biases in the MLP are not supported")
    _refuse_window(facts, model_type)


def _refuse_window(facts: Facts, model_type: str) -> None:
    layer_types = facts.get("layer_types")
    if layer_types is not None:
        kinds = sorted({str(kind) for kind in layer_types}) if isinstance(layer_types, list) else [layer_types]
        if kinds != ["full_attention"]:
            raise facts.fail("layer_types", kinds, "only full_attention in every layer is supported")
        return
    window = facts.get("sliding_window")
    used = model_type == "llama" or (
        facts.flag("use_sliding_window", default=False)
        and facts.count("max_window_layers", 28) < facts.count("num_hidden_layers")
    )
    if window is not None and used:
        raise facts.fail("sliding_window", window, "sliding-window attention is not supported")


def _dtype(facts: Facts) -> str:
    name = facts.get("torch_dtype") or facts.get("dtype") or "float32"
    if name not in _DTYPES:
        raise facts.fail("torch_dtype", name, f"supported are {', '.join(_DTYPES)}")
    return str(name)


def _rope(outer: Facts, positions: int) -> tuple[float, RopeScaling | None]:
    """Both spellings: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters`` with theta inside."""
    key = "rope_parameters" if outer.get("rope_parameters") is not None else "rope_scaling"
    raw = outer.get(key)
    theta = outer.number("rope_theta", 10000.0)
    if raw is None:
        return theta, None
    if not isinstance(raw, dict):
        raise outer.fail(key, raw, "an object is needed")
    inner = Facts(raw={f"{key}.{name}": value for name, value in raw.items()}, where=outer.where, prefix=f"{key}.")
    if inner.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0)) != 1.0:
        raise inner.fail("partial_rotary_factor", "below 1", "only rotation of the whole head is supported")
    if inner.get("original_max_position_embeddings") is None and outer.get("original_max_position_embeddings"):
        original = outer.count("original_max_position_embeddings")
        inner = attrs.evolve(inner, raw={**inner.raw, f"{key}.original_max_position_embeddings": original})
    return inner.number("rope_theta", theta), _scaling(inner, positions)


def _scaling(facts: Facts, positions: int) -> RopeScaling | None:
    kind = facts.get("rope_type") or facts.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=RopeKind.LINEAR, factor=facts.number("factor"))
    if kind == "llama3":
        low, high = facts.number("low_freq_factor"), facts.number("high_freq_factor")
        if low >= high:
            raise facts.fail("high_freq_factor", high, f"it has to be above low_freq_factor, {low}")
        return RopeScaling(
            kind=RopeKind.LLAMA3,
            factor=facts.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=facts.count("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(facts, facts.count("original_max_position_embeddings", positions))
    raise facts.fail("rope_type", kind, "supported are default, linear, llama3 and yarn")


def _yarn(facts: Facts, original: int) -> RopeScaling:
    factor = facts.number("factor")
    if facts.get("attention_factor") is not None:
        attention = facts.number("attention_factor")
    elif facts.get("mscale") and facts.get("mscale_all_dim"):
        attention = yarn_mscale(factor, facts.number("mscale")) / yarn_mscale(factor, facts.number("mscale_all_dim"))
    else:
        attention = yarn_mscale(factor)
    return RopeScaling(
        kind=RopeKind.YARN,
        factor=factor,
        original_max_positions=original,
        beta_fast=facts.number("beta_fast", 32.0),
        beta_slow=facts.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=facts.flag("truncate", default=True),
    )
