"""``config.json`` of a Hugging Face checkpoint to :class:`ModelConfig`."""

from __future__ import annotations

from types import MappingProxyType

from tokenspeed.checkpoint.config import ARCHITECTURES, ModelConfig, RopeKind
from tokenspeed.checkpoint.config_hf_gemma import GEMMA_TYPE, gemma_from_hf
from tokenspeed.checkpoint.config_hf_parts import rope_of, stored_dtype
from tokenspeed.checkpoint.facts import Facts, JsonObject

_DEFAULT_POSITIONS = MappingProxyType({"llama": 2048, "qwen2": 32768, "qwen3": 32768})
"""The families read here, and what a missing ``max_position_embeddings`` means in each."""


def config_from_hf(raw: JsonObject, where: str = "config.json") -> ModelConfig:
    """Read the keys this build acts on and refuse those that would change the mathematics.

    Args:
        raw: the parsed file.
        where: its name, for messages.
    Raises: ModelError: names the key, its value and what is supported.
    """
    facts = Facts(raw=raw, where=where)
    model_type = _family(facts)
    if model_type == GEMMA_TYPE:
        return gemma_from_hf(facts)
    _refuse(facts, model_type)
    hidden, heads = facts.count("hidden_size"), facts.count("num_attention_heads")
    kv_heads = facts.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise facts.fail("num_key_value_heads", kv_heads, f"it has to divide num_attention_heads, {heads}")
    positions = facts.count("max_position_embeddings", _DEFAULT_POSITIONS[model_type])
    theta, scaling = rope_of(facts, positions)
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
        torch_dtype=stored_dtype(facts),
    )


def _family(facts: Facts) -> str:
    supported = f"supported are {', '.join((*_DEFAULT_POSITIONS, GEMMA_TYPE))} (dense, text only)"
    for key in ("vision_config", "audio_config", "text_config", "thinker_config"):
        if facts.get(key) is not None:
            raise facts.fail(key, facts.get(key), f"models with images or sound are not supported; {supported}")
    model_type = facts.get("model_type")
    if model_type == GEMMA_TYPE:
        return GEMMA_TYPE
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
