"""A `Gemma3Step` of loaded weights and a pool with two cache groups."""

from __future__ import annotations

import math

import torch

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.attention.groups import FULL_GROUP, WINDOW_GROUP
from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.device.kv.grouped import GroupedPool, attention_pages
from tokenspeed.device.layers.rope import rope_frequencies, window_rope
from tokenspeed.device.models.gemma3 import Gemma3Group, Gemma3Layer, Gemma3Step
from tokenspeed.device.weights.load import Weights


def bind_gemma3(weights: Weights, pool: GroupedPool, *, page_tokens: int, kernels: Kernels) -> Gemma3Step:
    """Bind `weights`, which it takes and empties, to `pool`, whose groups are those of `attention_groups`.

    Raises: ModelError: the rope scaling's parameters cannot be used.
    """
    config, embedding = weights.config, weights.take("embedding")
    scaling = config.rope_scaling

    def group(number: int, frequencies: torch.Tensor, magnitude: float) -> Gemma3Group:
        pages = attention_pages(
            pool,
            number,
            kv_heads=config.num_kv_heads,
            page_tokens=page_tokens,
            head_dim=config.head_dim,
            kernels=kernels,
        )
        window = pool.layout.groups[number].window_tokens
        return Gemma3Group(pool=pages, window=window, frequencies=frequencies, magnitude=magnitude)

    return Gemma3Step(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        embedding=embedding,
        embedding_scale=config.embedding_scale,
        layers=tuple(_layer(weights, number, config, kernels) for number in range(config.num_layers)),
        groups=(
            group(FULL_GROUP, rope_frequencies(config), 1.0 if scaling is None else scaling.attention_factor),
            group(WINDOW_GROUP, rope_frequencies(window_rope(config)), 1.0),
        ),
        norm=weights.take("norm"),
        head=kernels.linear(embedding if config.tie_embeddings else weights.take("head"), None),
        kernels=kernels,
    )


def _layer(weights: Weights, number: int, config: ModelConfig, kernels: Kernels) -> Gemma3Layer:
    def take(name: str) -> torch.Tensor:
        return weights.take(f"{number}.{name}")

    windowed = number in config.window_layers
    own = config.window_layers if windowed else config.full_layers
    qk_norm = take("qk_norm")
    if config.query_scale is not None:
        # Attention scales by head_dim ** -0.5; the rest of another scale goes into the norm of the queries.
        qk_norm[: config.num_heads] *= config.query_scale * math.sqrt(config.head_dim)
    return Gemma3Layer(
        group=WINDOW_GROUP if windowed else FULL_GROUP,
        index=own.index(number),
        attn_norm=take("attn_norm"),
        qkv=kernels.linear(take("qkv"), None),
        qk_norm=qk_norm,
        out=kernels.linear(take("out"), None),
        attn_post_norm=take("attn_post_norm"),
        mlp_norm=take("mlp_norm"),
        gate_up=kernels.linear(take("gate_up"), None),
        down=kernels.linear(take("down"), None),
        mlp_post_norm=take("mlp_post_norm"),
    )
