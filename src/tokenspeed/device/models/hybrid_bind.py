"""A `HybridStep` of loaded weights and a pool with two cache groups."""

from __future__ import annotations

import torch

from tokenspeed.checkpoint.config import LinearAttention, ModelConfig
from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.device.kv.grouped import GroupedPool, attention_pages
from tokenspeed.device.layers.rope import rope_frequencies
from tokenspeed.device.models.hybrid import (
    FULL_GROUP,
    STATE_GROUP,
    FullMixer,
    HybridLayer,
    HybridStep,
    LinearMixer,
)
from tokenspeed.device.weights.load import Weights


def bind_hybrid(
    weights: Weights, linear: LinearAttention, pool: GroupedPool, *, page_tokens: int, kernels: Kernels
) -> HybridStep:
    """Bind `weights`, which it takes and empties, to `pool`, whose groups are those of `attention_groups`.

    Raises: ModelError: the rope scaling's parameters cannot be used.
    """
    config, embedding = weights.config, weights.take("embedding")
    pages = attention_pages(
        pool,
        FULL_GROUP,
        kv_heads=config.num_kv_heads,
        page_tokens=page_tokens,
        head_dim=config.head_dim,
        kernels=kernels,
    )
    shape = (len(linear.layers), linear.heads, linear.key_dim, linear.value_dim)
    return HybridStep(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        embedding=embedding,
        layers=tuple(_layer(weights, number, config, linear, kernels) for number in range(config.num_layers)),
        norm=weights.take("norm"),
        head=kernels.linear(embedding if config.tie_embeddings else weights.take("head"), None),
        frequencies=rope_frequencies(config),
        pages=pages,
        states=pool.layer_bytes(STATE_GROUP).view(torch.float32).view(-1, *shape),
        kernels=kernels,
    )


def _layer(
    weights: Weights, number: int, config: ModelConfig, linear: LinearAttention, kernels: Kernels
) -> HybridLayer:
    def take(name: str) -> torch.Tensor:
        return weights.take(f"{number}.{name}")

    mixer: FullMixer | LinearMixer
    if number in linear.layers:
        mixer = LinearMixer(
            index=linear.layers.index(number),
            qkvz=kernels.linear(take("qkvz"), None),
            rates=kernels.linear(take("rates"), None),
            decay_log=take("decay_log"),
            decay_bias=take("decay_bias"),
            norm=take("mixer_out_norm"),
            out=kernels.linear(take("out"), None),
        )
    else:
        mixer = FullMixer(
            index=config.full_layers.index(number),
            qkv=kernels.linear(take("qkv"), None),
            out=kernels.linear(take("out"), None),
        )
    return HybridLayer(
        mixer_norm=take("attn_norm"),
        mixer=mixer,
        mlp_norm=take("mlp_norm"),
        gate_up=kernels.linear(take("gate_up"), None),
        down=kernels.linear(take("down"), None),
    )
