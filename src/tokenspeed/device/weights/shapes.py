"""Which tensors a model has (Llama, Gemma 3, a hybrid), under the names that Hugging Face gives them."""

from __future__ import annotations

import math
from typing import TypeAlias

from tokenspeed.checkpoint.config import LinearAttention, ModelConfig

Shape: TypeAlias = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

FLOAT32_BYTES = 4


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model, in the order they are read; matrices are ``[out, in]``."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{part}": shape for part, shape in _layer_shapes(config, layer).items()})
    shapes[NORM] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def mlp_norm_name(config: ModelConfig) -> str:
    """The norm before the feed-forward; with post norms, ``post_attention_layernorm`` is the one after attention."""
    return "pre_feedforward_layernorm.weight" if config.post_norms else "post_attention_layernorm.weight"


def model_bytes(config: ModelConfig) -> int:
    """Memory of the loaded model in float32.

    A tied embedding counts twice: it is kept as rows to look up and, for the output projection, in
    the order that a projection reads fastest.
    """
    numbers = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    tied = config.vocab_size * config.hidden_size if config.tie_embeddings else 0
    return (numbers + tied) * FLOAT32_BYTES


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    if config.linear is not None and layer in config.linear.layers:
        return _linear_layer_shapes(config, config.linear)
    hidden, wide, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if config.post_norms:
        shapes |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
    if config.attention_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _linear_layer_shapes(config: ModelConfig, linear: LinearAttention) -> dict[str, Shape]:
    hidden, wide, heads = config.hidden_size, config.intermediate_size, linear.heads
    keys, values = heads * linear.key_dim, heads * linear.value_dim
    return {
        "input_layernorm.weight": (hidden,),
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * heads, hidden),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (linear.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
