"""A hybrid decoder: layers of linear attention between layers of full attention.

In the manner of Qwen3-Next: a pre-norm decoder whose mixers are the gated delta rule
(`device.layers.gated_delta`) in some layers, and attention with grouped queries and rotary positions
in the others; each is followed by a SwiGLU feed-forward. Without the short convolution in front of the
linear layers and without the gate behind the full ones. float32, torch.

A full layer keeps keys and values in cache group FULL_GROUP. The linear layers keep a state in group
STATE_GROUP: one block holds the states of all of them behind one token, float32
``[heads, key_dim, value_dim]`` each. A forward reads a row's block and writes it over.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional

from tokenspeed.device.attention.batch import AttentionBatch, KvGeometry, attention_batch
from tokenspeed.device.attention.paged import attend
from tokenspeed.device.host_sync import device_code
from tokenspeed.device.kernels.linear import Linear
from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.device.kv.pool import KvPool
from tokenspeed.device.layers.gated_delta import DeltaInputs, advance, decay_of
from tokenspeed.device.layers.rope import rope_turns
from tokenspeed.device.models.decoder import run_decoder
from tokenspeed.device.step import LayersReady, RaggedRows

FULL_GROUP, STATE_GROUP = 0, 1


@attrs.frozen(kw_only=True, eq=False)
class FullMixer:
    """Attention of one layer.

    Attributes:
        index: the layer's number among those with full attention.
        qkv: hidden to ``[heads + 2 * kv_heads, head_dim]``; rows of q and k in pair order.
    """

    index: int
    qkv: Linear
    out: Linear


@attrs.frozen(kw_only=True, eq=False)
class LinearMixer:
    """The gated delta rule of one layer.

    Attributes:
        index: the layer's number among those with linear attention.
        qkvz: hidden to q, k (``[heads, key_dim]``), v and the output's gate z (``[heads, value_dim]``).
        rates: hidden to ``[2 * heads]``: what decides on the written share, then on the decay.
        decay_log, decay_bias: float32 ``[heads]``, see `decay_of`.
        norm: float32 ``[value_dim]``.
    """

    index: int
    qkvz: Linear
    rates: Linear
    decay_log: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    out: Linear


@attrs.frozen(kw_only=True, eq=False)
class HybridLayer:
    """Attributes: `gate_up`: hidden to ``[2 * intermediate]``, gate first."""

    mixer_norm: torch.Tensor
    mixer: FullMixer | LinearMixer
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@attrs.frozen(kw_only=True, eq=False)
class HybridBatch:
    """One batch, ready for every layer.

    Attributes:
        blocks: int64 ``[n]``, the rows' state blocks.
    """

    attention: AttentionBatch
    turns: torch.Tensor
    blocks: torch.Tensor
    offsets: tuple[int, ...]


@attrs.frozen(kw_only=True, eq=False)
class HybridStep:
    """`device.step.ForwardStep` of one loaded model. Called from the exec stream's jobs.

    Attributes:
        embedding: float32 ``[vocab, hidden]``.
        pages: keys and values of the full layers.
        states: float32 ``[blocks, linear layers, heads, key_dim, value_dim]``, a view of the pool.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    embedding: torch.Tensor
    layers: tuple[HybridLayer, ...]
    norm: torch.Tensor
    head: Linear
    frequencies: torch.Tensor
    pages: KvPool
    states: torch.Tensor
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
        return functional.embedding(token_ids, self.embedding)

    def begin(self, rows: RaggedRows, layers: range) -> HybridBatch:
        full, state = rows.group_tables
        geometry = KvGeometry(
            page_tokens=self.pages.page_tokens,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            run_stride=self.pages.run_stride,
        )
        attention = attention_batch(rows, geometry, full)
        mixers = [self.layers[index].mixer for index in layers]
        own = [mixer.index for mixer in mixers if isinstance(mixer, FullMixer)]
        if own:
            self.kernels.zero_pages(self.pages.pages[:, own[0] : own[-1] + 1], attention.opened)
        return HybridBatch(
            attention=attention,
            turns=rope_turns(self.frequencies, rows.positions, 1.0),
            blocks=state[:, 0].long(),
            offsets=_on_host(rows.offsets),
        )

    def layer(self, index: int, hidden: torch.Tensor, batch: HybridBatch) -> torch.Tensor:
        layer, kernels, eps = self.layers[index], self.kernels, self.rms_eps
        normed = kernels.rms_norm(hidden, layer.mixer_norm, eps)
        if isinstance(layer.mixer, FullMixer):
            hidden = hidden + self._full(layer.mixer, normed, batch)
        else:
            hidden = hidden + self._linear(layer.mixer, normed, batch)
        gate_up = layer.gate_up(kernels.rms_norm(hidden, layer.mlp_norm, eps))
        return hidden.add_(layer.down(kernels.silu_mul(gate_up)))

    def _full(self, mixer: FullMixer, normed: torch.Tensor, batch: HybridBatch) -> torch.Tensor:
        heads, kv_heads, kernels = self.heads, self.kv_heads, self.kernels
        qkv = mixer.qkv(normed).view(len(normed), -1, self.head_dim)
        kernels.rotary(qkv[:, : heads + kv_heads], batch.turns)
        kernels.kv_write(self.pages.vectors(mixer.index), batch.attention.places, qkv[:, heads:])
        runs = self.pages.runs(mixer.index)
        return mixer.out(attend(qkv, runs, batch.attention, heads=heads, kv_heads=kv_heads, kernels=kernels))

    def _linear(self, mixer: LinearMixer, normed: torch.Tensor, batch: HybridBatch) -> torch.Tensor:
        _, _, heads, key_dim, value_dim = self.states.shape
        tokens = len(normed)
        parts = torch.split(mixer.qkvz(normed), [heads * key_dim] * 2 + [heads * value_dim] * 2, dim=1)
        query, key = (functional.normalize(part.view(tokens, heads, key_dim), dim=2) for part in parts[:2])
        value, gate = (part.view(tokens, heads, value_dim) for part in parts[2:])
        write, rate = mixer.rates(normed).chunk(2, dim=1)
        inputs = DeltaInputs(
            query=query * key_dim**-0.5,
            key=key,
            value=value,
            decay=decay_of(rate, mixer.decay_log, mixer.decay_bias),
            write=write.sigmoid(),
        )
        kept = self.states[:, mixer.index]
        states = kept.index_select(0, batch.blocks)
        mixed = advance(states, inputs, batch.offsets)
        kept.index_copy_(0, batch.blocks, states)
        gated = self.kernels.rms_norm(mixed, mixer.norm, self.rms_eps) * functional.silu(gate)
        return mixer.out(gated.reshape(tokens, heads * value_dim))


@device_code
def _on_host(offsets: torch.Tensor) -> tuple[int, ...]:
    return tuple(offsets.tolist())
