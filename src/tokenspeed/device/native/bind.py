"""A native step of packed weights and a KV pool."""

from __future__ import annotations

import ctypes
import math

import attrs
import torch

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.kernels.registry import REGISTRY, KernelSet
from tokenspeed.device.kv.pool import KvPool
from tokenspeed.device.layers.rope import rope_frequencies
from tokenspeed.device.native.library import NativeLibrary
from tokenspeed.device.native.memory import zeroed_tensor
from tokenspeed.device.native.step import NativeStep
from tokenspeed.device.native.structs import Format, LayerStruct, ModelStruct, PoolStruct
from tokenspeed.device.native.weights import NativeLayer, NativeWeights
from tokenspeed.errors import InvariantBroken

KV_FORMATS = {torch.float32: Format.F32, torch.float16: Format.F16}
SLACK = 64
"""Elements behind the last page: its last vector may be read past its end, never used from there."""

STRETCH = 128
"""Positions of one softmax (TS_ATTENTION_STRETCH); pages divide it."""


@attrs.frozen(kw_only=True, eq=False)
class NativeModelBound:
    """`device.parts.BoundModel`."""

    step: NativeStep
    pool: KvPool


def bind_native(
    library: NativeLibrary,
    weights: NativeWeights,
    *,
    num_pages: int,
    page_tokens: int,
    threads: int,
    kv_dtype: torch.dtype = torch.float32,
) -> NativeModelBound:
    """Bind `weights` to a new pool.

    Raises: InvariantBroken: pages that do not divide a stretch of attention, or of another dtype.
        ModelError: the rope scaling's parameters cannot be used.
    """
    if page_tokens < 1 or STRETCH % page_tokens or kv_dtype not in KV_FORMATS or num_pages < 2:
        raise InvariantBroken("a pool the native forward cannot use", page_tokens=page_tokens, dtype=kv_dtype)
    pool = _pool(weights.config, num_pages, page_tokens, kv_dtype)
    frequencies = rope_frequencies(weights.config).contiguous()
    step = NativeStep(
        library=library,
        weights=weights,
        frequencies=frequencies,
        model=_model(weights, frequencies),
        pool=pool,
        pages=PoolStruct(
            pages=pool.pages.data_ptr(),
            format=int(KV_FORMATS[kv_dtype]),
            num_pages=num_pages,
            page_tokens=page_tokens,
            layers=weights.config.num_layers,
        ),
        threads=threads,
    )
    return NativeModelBound(step=step, pool=pool)


def _pool(config: ModelConfig, num_pages: int, page_tokens: int, dtype: torch.dtype) -> KvPool:
    """Zeros, laid out as `kv.pool` says, except that a run of keys is ``[head_dim, page_tokens]``."""
    shape = (num_pages, config.num_layers, 2, config.num_kv_heads, page_tokens, config.head_dim)
    count = math.prod(shape)
    pages = zeroed_tensor(count + SLACK, dtype)[:count].view(shape)
    return KvPool(pages=pages, kernels=REGISTRY[KernelSet.TORCH])


def _model(weights: NativeWeights, frequencies: torch.Tensor) -> ModelStruct:
    config, scaling = weights.config, weights.config.rope_scaling
    layers = (LayerStruct * config.num_layers)(*(_layer(layer) for layer in weights.layers))
    return ModelStruct(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        rms_eps=config.rms_eps,
        rope_magnitude=1.0 if scaling is None else scaling.attention_factor,
        rope_frequencies=frequencies.data_ptr(),
        norm=weights.norm.data_ptr(),
        embedding=weights.embedding.struct(),
        head=weights.head.struct(),
        layers=ctypes.cast(layers, ctypes.POINTER(LayerStruct)),  # the pointer keeps the array alive
    )


def _layer(layer: NativeLayer) -> LayerStruct:
    return LayerStruct(
        attn_norm=layer.attn_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        q=layer.q.struct(),
        k=layer.k.struct(),
        v=layer.v.struct(),
        o=layer.o.struct(),
        gate=layer.gate.struct(),
        up=layer.up.struct(),
        down=layer.down.struct(),
    )
