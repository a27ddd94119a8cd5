"""One list of kernels: which operations there are, and who implements them.

A model is written against :class:`Kernels` and never against an implementation. The torch
implementation serves every device torch runs on, and is what others are compared with; the Triton
implementation serves graphics devices and is imported only where it is chosen.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import attrs
import torch

from tokenspeed.device.kernels import torch_kernels, torch_paged, torch_sampling
from tokenspeed.device.kernels.linear import Linear, packed_linear
from tokenspeed.device.kernels.paged import PagedBatch
from tokenspeed.device.kernels.sample_rules import SampleRules
from tokenspeed.errors import NotSupported


class LinearKernel(Protocol):
    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A projection by float32 ``[out, in]``, prepared for many calls; `weight` may be let go after."""
        ...


class RmsNormKernel(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, a new tensor (arXiv:1910.07467)."""
        ...


class RotaryKernel(Protocol):
    def __call__(self, x: torch.Tensor, turns: torch.Tensor) -> None:
        """Turn pairs in place: ``x[t, h, 2i:2i+2]`` as a complex number times ``turns[t, 0, i]``.

        Args:
            x: float32 ``[T, heads, head_dim]``; may be a view into wider rows.
            turns: complex64 ``[T, 1, head_dim / 2]``.
        """
        ...


class GateMulKernel(Protocol):
    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``activation(gate) * up`` of float32 ``[T, 2 * width]``, gate first; a new ``[T, width]``.

        For GELU the tanh formula (arXiv:1606.08415).
        """
        ...


class KvWriteKernel(Protocol):
    def __call__(self, vectors: torch.Tensor, places: torch.Tensor, kv: torch.Tensor) -> None:
        """Write keys and values of new tokens.

        Args:
            vectors: float32 ``[*, head_dim]``, a layer's view of the pool.
            places: int64 ``[T * 2 * kv_heads]``, rows of `vectors`, in the order of `kv`. Kernels that
                a captured graph can hold pass over negative ones, those of padded rows; torch's has
                no padded rows and must not be given them.
            kv: float32 ``[T, 2 * kv_heads, head_dim]``, keys first; may be a view.
        """
        ...


class KvGatherKernel(Protocol):
    def __call__(self, vectors: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Read rows `places` (int64 ``[N]``) of `vectors`; a new float32 ``[N, head_dim]``."""
        ...


class AttentionKernel(Protocol):
    def __call__(
        self, q: torch.Tensor, runs: torch.Tensor, pages: torch.Tensor, mask: torch.Tensor, space: torch.Tensor
    ) -> torch.Tensor:
        """Softmax attention of `R` rows of `n` queries over the paged keys and values of each row.

        Args:
            q: float32 ``[R, heads, n, head_dim]``, any strides.
            runs: float32 ``[*, page_tokens * head_dim]``, a layer's view of the pool.
            pages: int64 ``[2 * R * kv_heads * blocks]``, rows of `runs`: keys then values, row after
                row, head after head, in token order; 0 (the null page) behind a row's context.
            mask: float32, broadcasts to ``[R, heads, n, blocks * page_tokens]``; 0 or -inf.
            space: float32 ``[2, R, kv_heads, blocks * page_tokens, head_dim]``, scratch.
        Returns: float32 ``[R, heads, n, head_dim]``, each query head over kv head ``h * kv_heads // heads``.
        """
        ...


class FreshAttentionKernel(Protocol):
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of a sequence's first chunk, whose context is the chunk itself.

        Args:
            q: float32 ``[1, heads, n, head_dim]``, k and v ``[1, kv_heads, n, head_dim]``, any strides.
        """
        ...


class PagedAttentionKernel(Protocol):
    def __call__(self, q: torch.Tensor, vectors: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Causal softmax attention of ragged rows that finds keys and values by their block tables.

        Scores are scaled by ``head_dim ** -0.5``; query head h is over kv head ``h * kv_heads // heads``.

        Args:
            q: float32 ``[T, heads, head_dim]``; may be a view, its last dimension dense.
            vectors: float32 ``[*, head_dim]``, a layer's view of the pool; the batch's own keys and
                values are in it. What lies behind a row's context, or behind its window, is not read.
        Returns: float32 ``[T, heads, head_dim]``; zeros for padded rows.
        """
        ...


class SampleKernel(Protocol):
    def __call__(self, logits: torch.Tensor, rules: SampleRules) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token a row.

        Args:
            logits: float32 ``[m, vocab]``, last dimension dense; not written to.
        Returns: int64 ``[m]``; bool ``[m]``, rows with a NaN or without a finite largest logit, whose token is 0.
        """
        ...


class CopyPagesKernel(Protocol):
    def __call__(self, pages: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy ``pages[source]`` to ``pages[destination]``, as if every source were read first."""
        ...


class ZeroPagesKernel(Protocol):
    def __call__(self, pages: torch.Tensor, blocks: tuple[int, ...]) -> None:
        """Zero ``pages[block]``; `pages` may be a view of some layers."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Kernels:
    """One implementation of every operation.

    Attributes:
        gemma_rms_norm: as `rms_norm`, by ``1 + weight``.
        paged_decode: for one query a row only; `paged_prefill` for any numbers, mixed.
        follows_tables: attention is that of these two; otherwise the host lists pages and masks for
            `decode_attention`, `prefill_attention` and `fresh_attention`.
    """

    linear: LinearKernel
    rms_norm: RmsNormKernel
    gemma_rms_norm: RmsNormKernel
    rotary: RotaryKernel
    silu_mul: GateMulKernel
    gelu_tanh_mul: GateMulKernel
    kv_write: KvWriteKernel
    kv_gather: KvGatherKernel
    decode_attention: AttentionKernel
    prefill_attention: AttentionKernel
    fresh_attention: FreshAttentionKernel
    paged_decode: PagedAttentionKernel
    paged_prefill: PagedAttentionKernel
    sample: SampleKernel
    copy_pages: CopyPagesKernel
    zero_pages: ZeroPagesKernel
    follows_tables: bool = False


class KernelSet(enum.Enum):
    """Names of the implementations."""

    TORCH = "torch"
    TRITON = "triton"


REGISTRY: Mapping[KernelSet, Kernels] = MappingProxyType(
    {
        KernelSet.TORCH: Kernels(
            linear=packed_linear,
            rms_norm=torch_kernels.rms_norm,
            gemma_rms_norm=torch_kernels.gemma_rms_norm,
            rotary=torch_kernels.rotary,
            silu_mul=torch_kernels.silu_mul,
            gelu_tanh_mul=torch_kernels.gelu_tanh_mul,
            kv_write=torch_kernels.kv_write,
            kv_gather=torch_paged.kv_gather,
            decode_attention=torch_kernels.paged_attention,
            prefill_attention=torch_kernels.paged_attention,
            fresh_attention=torch_kernels.fresh_attention,
            paged_decode=torch_paged.ragged_attention,
            paged_prefill=torch_paged.ragged_attention,
            sample=torch_sampling.sample,
            copy_pages=torch_kernels.copy_pages,
            zero_pages=torch_kernels.zero_pages,
        )
    }
)
"""The sets that need torch alone; `kernel_set` has them all."""

BY_DEVICE: Mapping[str, KernelSet] = MappingProxyType({"cpu": KernelSet.TORCH, "cuda": KernelSet.TRITON})
"""By `torch.device.type`."""


def kernels_for(device_type: str, forced: KernelSet | None = None) -> Kernels:
    """The kernels that serve a device, or the ones that are asked for.

    Raises: NotSupported: no set serves the device, or Triton is not installed.
    """
    chosen = forced or BY_DEVICE.get(device_type)
    if chosen is None:
        raise NotSupported(f"kernels: none serve {device_type!r} devices; known: {', '.join(BY_DEVICE)}")
    return kernel_set(chosen)


def kernel_set(kind: KernelSet) -> Kernels:
    """Raises: NotSupported: Triton is not installed."""
    if kind is not KernelSet.TRITON:
        return REGISTRY[kind]
    try:
        from tokenspeed.device.kernels.triton.kernel_set import TRITON_KERNELS
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "triton":
            raise
        raise NotSupported("kernels: Triton is not installed; install the triton package") from None
    return TRITON_KERNELS
