"""Gemma 3 (arXiv:2503.19786): layers with a sliding window and layers that see everything, in turns.

What differs from the Llama family: norms after attention and feed-forward as well as before, scaled
embeddings, GELU in the feed-forward, and two rotary bases. Layers of the two kinds keep their keys and
values in cache groups of their own; a block behind the window is no longer the sequence's and is not
read. In float32; the order of sums is as in `models.llama`.
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
class Gemma3Group:
    """Layers of one kind.

    Attributes:
        pool: their part of the KV pool.
        window: tokens a query sees, itself included; 0: all before it.
        frequencies: float32 ``[head_dim / 2]``; `magnitude` goes with them, see `rope_turns`.
    """

    pool: KvPool
    window: int
    frequencies: torch.Tensor
    magnitude: float = 1.0


@attrs.frozen(kw_only=True, eq=False)
class Gemma3Layer:
    """One decoder layer's weights.

    Attributes:
        group, index: its cache group, and its number among that group's layers.
        qkv: hidden to ``[heads + 2 * kv_heads, head_dim]``; rows of q and k in pair order.
        qk_norm: float32 ``[heads + kv_heads, head_dim]`` in pair order; the scale of scores is in it
            where it is not ``head_dim ** -0.5``.
        gate_up: hidden to ``[2 * intermediate]``, gate first.
    """

    group: int
    index: int
    attn_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor
    out: Linear
    attn_post_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mlp_post_norm: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class GroupBatch:
    """What one cache group's layers need to know of a batch."""

    attention: AttentionBatch
    turns: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Gemma3Step:
    """`device.step.ForwardStep` of one loaded model. Called from the exec stream's jobs.

    Attributes:
        embedding: float32 ``[vocab, hidden]``, not scaled.
        groups: by the number of the cache group.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    embedding: torch.Tensor
    embedding_scale: float
    layers: tuple[Gemma3Layer, ...]
    groups: tuple[Gemma3Group, ...]
    norm: torch.Tensor
    head: Linear
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
        return torch.nn.functional.embedding(token_ids, self.embedding).mul_(self.embedding_scale)

    def begin(self, rows: RaggedRows, layers: range) -> tuple[GroupBatch, ...]:
        """By the number of the cache group."""
        return tuple(self._group_batch(rows, number, layers) for number in range(len(self.groups)))

    def _group_batch(self, rows: RaggedRows, number: int, layers: range) -> GroupBatch:
        """Plan one group's attention, and clear the pages that its layers among `layers` begin to fill."""
        group = self.groups[number]
        geometry = KvGeometry(
            page_tokens=group.pool.page_tokens,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            run_stride=group.pool.run_stride,
            window=group.window,
            follows_tables=self.kernels.follows_tables,
        )
        attention = attention_batch(rows, geometry, rows.group_tables[number])
        own = [self.layers[layer].index for layer in layers if self.layers[layer].group == number]
        if own:
            self.kernels.zero_pages(group.pool.pages[:, own[0] : own[-1] + 1], attention.opened)
        return GroupBatch(attention=attention, turns=rope_turns(group.frequencies, rows.positions, group.magnitude))

    def layer(self, index: int, hidden: torch.Tensor, batches: tuple[GroupBatch, ...]) -> torch.Tensor:
        layer, kernels, eps = self.layers[index], self.kernels, self.rms_eps
        batch, pool = batches[layer.group], self.groups[layer.group].pool
        heads, kv_heads = self.heads, self.kv_heads
        qkv = layer.qkv(kernels.rms_norm(hidden, layer.attn_norm, eps)).view(len(hidden), -1, self.head_dim)
        qk = qkv[:, : heads + kv_heads]
        torch.mul(torch.nn.functional.rms_norm(qk, (self.head_dim,), None, eps), layer.qk_norm, out=qk)
        kernels.rotary(qk, batch.turns)
        kernels.kv_write(pool.vectors(layer.index), batch.attention.places, qkv[:, heads:])
        runs = pool.runs(layer.index)
        mixed = attend(qkv, runs, batch.attention, heads=heads, kv_heads=kv_heads, kernels=kernels)
        hidden = hidden + kernels.rms_norm(layer.out(mixed), layer.attn_post_norm, eps)
        gate_up = layer.gate_up(kernels.rms_norm(hidden, layer.mlp_norm, eps))
        return hidden.add_(kernels.rms_norm(layer.down(kernels.gelu_tanh_mul(gate_up)), layer.mlp_post_norm, eps))
