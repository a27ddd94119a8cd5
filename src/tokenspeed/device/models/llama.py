"""The Llama family: Llama, SmolLM2, Qwen2 (bias on q, k, v) and Qwen3 (norm of q and k).

A pre-norm decoder (Touvron et al. 2023, arXiv:2302.13971) with grouped queries, rotary positions and
a SwiGLU feed-forward, in float32. Sums run in the order the libraries below choose, which depends on
how many tokens a call has: results of one row agree across batches to rounding, not bit for bit.
"""

from __future__ import annotations

import attrs
import torch

from tokenspeed.device.attention.batch import AttentionBatch, KvGeometry, attention_batch
from tokenspeed.device.attention.paged import attend
from tokenspeed.device.kernels.linear import Linear
from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.device.kv.pool import KvPool
from tokenspeed.device.layers.rope import rope_turns
from tokenspeed.device.models.decoder import run_decoder
from tokenspeed.device.step import LayersReady, RaggedRows


@attrs.frozen(kw_only=True, eq=False)
class LlamaLayer:
    """One decoder layer's weights.

    Attributes:
        qkv: hidden to ``[heads + 2 * kv_heads, head_dim]``; rows of q and k in pair order.
        qk_norm: float32 ``[heads + kv_heads, head_dim]`` in pair order, or None.
        gate_up: hidden to ``[2 * intermediate]``, gate first.
    """

    attn_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@attrs.frozen(kw_only=True, eq=False)
class LlamaBatch:
    """What the layers need to know of a batch."""

    attention: AttentionBatch
    turns: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class LlamaStep:
    """`device.step.ForwardStep` of one loaded model. Called from the exec stream's jobs.

    Attributes:
        embedding: float32 ``[vocab, hidden]``.
        frequencies: float32 ``[head_dim / 2]``; `magnitude` goes with them, see `rope_turns`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    embedding: torch.Tensor
    layers: tuple[LlamaLayer, ...]
    norm: torch.Tensor
    head: Linear
    frequencies: torch.Tensor
    magnitude: float
    pool: KvPool
    kernels: Kernels

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ForwardStep.run`."""
        return run_decoder(self, rows, layers=layers, ready=ready, hidden=hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, self.embedding)

    def begin(self, rows: RaggedRows, layers: range) -> LlamaBatch:
        attention = attention_batch(rows, self._kv_geometry(), rows.block_tables)
        self.kernels.zero_pages(self.pool.pages[:, layers.start : layers.stop], attention.opened)
        return LlamaBatch(attention=attention, turns=rope_turns(self.frequencies, rows.positions, self.magnitude))

    def layer(self, index: int, hidden: torch.Tensor, batch: LlamaBatch) -> torch.Tensor:
        layer, kernels, eps = self.layers[index], self.kernels, self.rms_eps
        heads, kv_heads = self.heads, self.kv_heads
        qkv = layer.qkv(kernels.rms_norm(hidden, layer.attn_norm, eps)).view(len(hidden), -1, self.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            torch.mul(torch.nn.functional.rms_norm(qk, (self.head_dim,), None, eps), layer.qk_norm, out=qk)
        kernels.rotary(qk, batch.turns)
        kernels.kv_write(self.pool.vectors(index), batch.attention.places, qkv[:, heads:])
        mixed = attend(qkv, self.pool.runs(index), batch.attention, heads=heads, kv_heads=kv_heads, kernels=kernels)
        hidden = hidden + layer.out(mixed)
        gate_up = layer.gate_up(kernels.rms_norm(hidden, layer.mlp_norm, eps))
        return hidden.add_(layer.down(kernels.silu_mul(gate_up)))

    def _kv_geometry(self) -> KvGeometry:
        return KvGeometry(
            page_tokens=self.pool.page_tokens,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            run_stride=self.pool.run_stride,
            follows_tables=self.kernels.follows_tables,
        )
