"""A native step of packed weights and a KV pool."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np
import torch

from tokenspeed.checkpoint.config import Activation, ModelConfig
from tokenspeed.device.attention.groups import FULL_GROUP, WINDOW_GROUP, attention_groups
from tokenspeed.device.kernels.registry import REGISTRY, KernelSet
from tokenspeed.device.kv.grouped import GroupedPool, grouped_pool
from tokenspeed.device.kv.layout import cache_layout
from tokenspeed.device.kv.pool import KvPool
from tokenspeed.device.layers.rope import rope_frequencies, window_rope
from tokenspeed.device.native.library import NativeLibrary
from tokenspeed.device.native.memory import zeroed_tensor
from tokenspeed.device.native.step import NativeStep
from tokenspeed.device.native.structs import (
    CacheStruct,
    Format,
    Gate,
    LayerStruct,
    ModelStruct,
    PoolStruct,
    RopeStruct,
)
from tokenspeed.device.native.weights import NativeLayer, NativeWeights
from tokenspeed.errors import InvariantBroken

KV_FORMATS: Mapping[torch.dtype, Format] = MappingProxyType({torch.float32: Format.F32, torch.float16: Format.F16})
GATES: Mapping[Activation, Gate] = MappingProxyType({Activation.SILU: Gate.SILU, Activation.GELU_TANH: Gate.GELU_TANH})
SLACK = 64
"""Elements behind the last page: its last vector may be read past its end, never used from there."""

STRETCH = 128
"""Positions of one softmax (TS_ATTENTION_STRETCH); pages divide it."""

FULL_ROPE, WINDOW_ROPE = 0, 1
"""Numbers of a model's rotary settings."""


@attrs.frozen(kw_only=True, eq=False)
class NativeModelBound:
    """`device.parts.BoundModel`."""

    step: NativeStep
    pool: KvPool | GroupedPool


@attrs.frozen(kw_only=True, eq=False)
class _Caches:
    """A pool, and where each cache group's pages are in it."""

    pool: KvPool | GroupedPool
    structs: tuple[CacheStruct, ...]


def bind_native(
    library: NativeLibrary,
    weights: NativeWeights,
    *,
    num_pages: int,
    page_tokens: int,
    threads: int,
    kv_dtype: torch.dtype = torch.float32,
) -> NativeModelBound:
    """Bind `weights` to a new pool; of a model with window layers, `num_pages` are its parents.

    Raises: InvariantBroken: pages that do not divide a stretch of attention, or of another dtype.
        ModelError: the rope scaling's parameters cannot be used.
    """
    if page_tokens < 1 or STRETCH % page_tokens or kv_dtype not in KV_FORMATS or num_pages < 2:
        raise InvariantBroken("a pool the native forward cannot use", page_tokens=page_tokens, dtype=kv_dtype)
    config = weights.config
    make = _several_groups if config.window_layers else _one_group
    caches = make(config, num_pages, page_tokens, kv_dtype)
    frequencies = tuple(rope_frequencies(one).contiguous() for one in _ropes(config))
    structs = (CacheStruct * len(caches.structs))(*caches.structs)
    step = NativeStep(
        library=library,
        weights=weights,
        frequencies=frequencies,
        model=_model(weights, frequencies),
        pool=caches.pool,
        pages=PoolStruct(
            caches=ctypes.cast(structs, ctypes.POINTER(CacheStruct)),  # the pointer keeps the array alive
            num_caches=len(structs),
            format=int(KV_FORMATS[kv_dtype]),
        ),
        page_tokens=page_tokens,
        threads=threads,
    )
    return NativeModelBound(step=step, pool=caches.pool)


def _one_group(config: ModelConfig, num_pages: int, page_tokens: int, dtype: torch.dtype) -> _Caches:
    """Zeros, laid out as `kv.pool` says, except that a run of keys is ``[head_dim, page_tokens]``."""
    shape = (num_pages, config.num_layers, 2, config.num_kv_heads, page_tokens, config.head_dim)
    count = math.prod(shape)
    pages = zeroed_tensor(count + SLACK, dtype)[:count].view(shape)
    cache = CacheStruct(
        pages=pages.data_ptr(),
        page_bytes=pages.stride(0) * dtype.itemsize,
        num_pages=num_pages,
        page_tokens=page_tokens,
        layers=config.num_layers,
    )
    return _Caches(pool=KvPool(pages=pages, kernels=REGISTRY[KernelSet.TORCH]), structs=(cache,))


def _several_groups(config: ModelConfig, num_parents: int, page_tokens: int, dtype: torch.dtype) -> _Caches:
    """Blocks of each group, laid out likewise, in one pool."""
    layout = cache_layout(attention_groups(config, page_tokens, number_bytes=dtype.itemsize))
    pool = grouped_pool(layout, num_parents=num_parents)
    caches = tuple(
        CacheStruct(
            pages=pool.bytes.data_ptr(),
            page_bytes=group.bytes_per_block,
            num_pages=num_parents * group.blocks_per_parent,
            page_tokens=group.block_tokens,
            layers=group.layers,
            window=group.window_tokens,
        )
        for group in layout.groups
    )
    return _Caches(pool=pool, structs=caches)


def _ropes(config: ModelConfig) -> tuple[ModelConfig, ...]:
    return (config, window_rope(config)) if config.window_layers else (config,)


def _model(weights: NativeWeights, frequencies: tuple[torch.Tensor, ...]) -> ModelStruct:
    config = weights.config
    scalings = [one.rope_scaling for one in _ropes(config)]
    magnitudes = [1.0 if scaling is None else scaling.attention_factor for scaling in scalings]
    ropes = (RopeStruct * len(frequencies))(
        *(RopeStruct(frequencies=f.data_ptr(), magnitude=m) for f, m in zip(frequencies, magnitudes, strict=True))
    )
    layers = (LayerStruct * config.num_layers)(
        *(_layer(layer, config, number) for number, layer in enumerate(weights.layers))
    )
    return ModelStruct(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        num_ropes=len(ropes),
        rms_eps=config.rms_eps,
        embedding_scale=config.embedding_scale,
        query_scale=_query_scale(config),
        ropes=ctypes.cast(ropes, ctypes.POINTER(RopeStruct)),  # these pointers keep the arrays alive
        norm=weights.norm.data_ptr(),
        embedding=weights.embedding.struct(),
        head=weights.head.struct(),
        layers=ctypes.cast(layers, ctypes.POINTER(LayerStruct)),
    )


def _query_scale(config: ModelConfig) -> float:
    if config.query_scale is not None:
        return config.query_scale
    return float(np.float32(1) / np.sqrt(np.float32(config.head_dim)))


def _layer(layer: NativeLayer, config: ModelConfig, number: int) -> LayerStruct:
    def address(vector: torch.Tensor | None) -> int | None:
        return None if vector is None else vector.data_ptr()

    windowed = number in config.window_layers
    own = config.window_layers if windowed else config.full_layers
    return LayerStruct(
        attn_norm=layer.attn_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        attn_post_norm=address(layer.attn_post_norm),
        mlp_post_norm=address(layer.mlp_post_norm),
        qk_norm=address(layer.qk_norm),
        cache=WINDOW_GROUP if windowed else FULL_GROUP,
        index=own.index(number),
        rope=WINDOW_ROPE if windowed else FULL_ROPE,
        activation=int(GATES[config.activation]),
        q=layer.q.struct(),
        k=layer.k.struct(),
        v=layer.v.struct(),
        o=layer.o.struct(),
        gate=layer.gate.struct(),
        up=layer.up.struct(),
        down=layer.down.struct(),
    )
