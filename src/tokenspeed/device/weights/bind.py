"""Make a runnable model of loaded weights and a KV pool."""

from __future__ import annotations

import attrs
import torch

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.attention.groups import attention_groups
from tokenspeed.device.executors.ports import BlockPool
from tokenspeed.device.kernels.registry import REGISTRY, Kernels, KernelSet
from tokenspeed.device.kv.grouped import GroupedPool, grouped_pool
from tokenspeed.device.kv.layout import cache_layout
from tokenspeed.device.kv.pool import KvPool, kv_pool
from tokenspeed.device.layers.rope import rope_frequencies
from tokenspeed.device.models.gemma3_bind import bind_gemma3
from tokenspeed.device.models.hybrid_bind import bind_hybrid
from tokenspeed.device.models.llama import LlamaLayer, LlamaStep
from tokenspeed.device.step import ForwardStep
from tokenspeed.device.weights.load import Weights
from tokenspeed.device.weights.shapes import FLOAT32_BYTES


@attrs.frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model that runs: `step` reads and writes `pool`."""

    step: ForwardStep
    pool: BlockPool
    weights_bytes: int
    config: ModelConfig


def bind_model(
    weights: Weights, *, num_pages: int, page_tokens: int, kernels: Kernels = REGISTRY[KernelSet.TORCH]
) -> LoadedModel:
    """Bind `weights`, which it takes and empties, to a new pool of `num_pages` (null page included).

    The pool is on the device of the weights. A model with window layers or linear attention has a pool of
    several groups; `num_pages` are its parents.

    Raises: ModelError: the rope scaling's parameters cannot be used.
    """
    config = weights.config
    device = weights.tensors["embedding"].device
    with torch.inference_mode(), device:  # what is computed from the configuration goes there, too
        groups = attention_groups(config, page_tokens, number_bytes=FLOAT32_BYTES)
        if len(groups) > 1:
            parents = grouped_pool(cache_layout(groups), num_parents=num_pages, device=device)
            several = _step_of_groups(weights, parents, page_tokens, kernels)
            return LoadedModel(step=several, pool=parents, weights_bytes=weights.nbytes, config=config)
        pool = kv_pool(config, num_pages=num_pages, page_tokens=page_tokens, kernels=kernels, device=device)
        step = _step(weights, config, pool, kernels)
    return LoadedModel(step=step, pool=pool, weights_bytes=weights.nbytes, config=config)


def _step_of_groups(weights: Weights, pool: GroupedPool, page_tokens: int, kernels: Kernels) -> ForwardStep:
    linear = weights.config.linear
    if linear is not None:
        return bind_hybrid(weights, linear, pool, page_tokens=page_tokens, kernels=kernels)
    return bind_gemma3(weights, pool, page_tokens=page_tokens, kernels=kernels)


def _step(weights: Weights, config: ModelConfig, pool: KvPool, kernels: Kernels) -> LlamaStep:
    embedding = weights.take("embedding")
    scaling = config.rope_scaling
    return LlamaStep(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        embedding=embedding,
        layers=tuple(_layer(weights, index, config, kernels) for index in range(config.num_layers)),
        norm=weights.take("norm"),
        head=kernels.linear(embedding if config.tie_embeddings else weights.take("head"), None),
        frequencies=rope_frequencies(config),
        magnitude=1.0 if scaling is None else scaling.attention_factor,
        pool=pool,
        kernels=kernels,
    )


def _layer(weights: Weights, index: int, config: ModelConfig, kernels: Kernels) -> LlamaLayer:
    def take(name: str) -> torch.Tensor:
        return weights.take(f"{index}.{name}")

    return LlamaLayer(
        attn_norm=take("attn_norm"),
        qkv=kernels.linear(take("qkv"), take("qkv_bias") if config.attention_bias else None),
        qk_norm=take("qk_norm") if config.qk_norm else None,
        out=kernels.linear(take("out"), None),
        mlp_norm=take("mlp_norm"),
        gate_up=kernels.linear(take("gate_up"), None),
        down=kernels.linear(take("down"), None),
    )
