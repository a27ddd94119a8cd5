"""The hybrid model written down again as plainly as possible: one sequence from its start, no cache, float64.

Shares nothing with the package but the configuration value and the drawn tensors.
"""

from __future__ import annotations

import math

import torch
from dense_llama import Tensors

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.weights.random_source import RandomSource
from tokenspeed.device.weights.shapes import tensor_shapes


def hybrid_tensors(checkpoint: Checkpoint) -> Tensors:
    source = RandomSource(checkpoint.seed, checkpoint.config)
    return {name: source.read(name).double() for name in tensor_shapes(checkpoint.config)}


def hybrid_logits(config: ModelConfig, tensors: Tensors, ids: list[int]) -> torch.Tensor:
    """Logits of every position, float64 ``[tokens, vocab]``."""
    x = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        weights = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        y = _norm(x, weights["input_layernorm.weight"], config.rms_eps)
        x = x + (_linear(config, weights, y) if layer in config.linear.layers else _attention(config, weights, y))
        y = _norm(x, weights["post_attention_layernorm.weight"], config.rms_eps)
        gate, up = y @ weights["mlp.gate_proj.weight"].T, y @ weights["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ weights["mlp.down_proj.weight"].T
    x = _norm(x, tensors["model.norm.weight"], config.rms_eps)
    return x @ tensors["model.embed_tokens.weight"].T


def hybrid_continuation(config: ModelConfig, tensors: Tensors, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, everything computed anew for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(hybrid_logits(config, tensors, ids)[-1].argmax()))
    return ids[len(prompt) :]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _linear(config: ModelConfig, weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The heads' states as matrices from keys to values, ``[heads, value_dim, key_dim]``, token by token."""
    heads, key_dim, value_dim = config.linear.heads, config.linear.key_dim, config.linear.value_dim
    mixed, rates = x @ weights["linear_attn.in_proj_qkvz.weight"].T, x @ weights["linear_attn.in_proj_ba.weight"].T
    ends = [heads * key_dim, 2 * heads * key_dim, 2 * heads * key_dim + heads * value_dim]
    q, k = mixed[:, : ends[0]].view(-1, heads, key_dim), mixed[:, ends[0] : ends[1]].view(-1, heads, key_dim)
    v, z = mixed[:, ends[1] : ends[2]].view(-1, heads, value_dim), mixed[:, ends[2] :].view(-1, heads, value_dim)
    q = q / q.norm(dim=2, keepdim=True) / math.sqrt(key_dim)
    k = k / k.norm(dim=2, keepdim=True)
    share = torch.sigmoid(rates[:, :heads])[..., None, None]
    speed = torch.log1p(torch.exp(rates[:, heads:] + weights["linear_attn.dt_bias"]))
    decay = torch.exp(-torch.exp(weights["linear_attn.A_log"]) * speed)[..., None, None]
    state, rows = torch.zeros(heads, value_dim, key_dim, dtype=torch.float64), []
    for token in range(len(x)):
        key, value = k[token], v[token]
        forget = torch.eye(key_dim, dtype=torch.float64) - share[token] * key[:, :, None] * key[:, None]
        state = decay[token] * state @ forget + share[token] * value[:, :, None] * key[:, None]
        rows.append((state @ q[token][..., None])[..., 0])
    out = _norm(torch.stack(rows), weights["linear_attn.norm.weight"], config.rms_eps)
    gated = (out * z * torch.sigmoid(z)).reshape(len(x), heads * value_dim)
    return gated @ weights["linear_attn.out_proj.weight"].T


def _attention(config: ModelConfig, weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    dim = config.head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(len(x)).double()[:, None] * frequencies

    def project(name: str) -> torch.Tensor:
        return (x @ weights[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, dim)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    q, k, v = rotate(project("q")), rotate(project("k")), project("v")
    heads = []
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        scores = q[:, head] @ k[:, shared].T / math.sqrt(dim)
        scores = scores + torch.full_like(scores, -math.inf).triu(1)
        heads.append(scores.softmax(-1) @ v[:, shared])
    return torch.cat(heads, dim=1) @ weights["self_attn.o_proj.weight"].T
