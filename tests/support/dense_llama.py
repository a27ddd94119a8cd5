"""The Llama family written down again as plainly as possible: one sequence, no cache, no pages, float64.

Shares nothing with the package but the configuration value and the drawn tensors.
"""

from __future__ import annotations

import math

import torch

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.weights.random_source import RandomSource

Tensors = dict[str, torch.Tensor]


def dense_tensors(config: ModelConfig, names: list[str], seed: int = 1) -> Tensors:
    """Random weights under Hugging Face names, q and k rows in halves."""
    source = RandomSource(seed, config)
    return {name: source.read(name).double() for name in names}


def dense_logits(config: ModelConfig, tensors: Tensors, ids: list[int], frequencies: torch.Tensor) -> torch.Tensor:
    """Logits of every position, float64 ``[tokens, vocab]``."""
    x = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
    angles = torch.arange(len(ids)).double()[:, None] * frequencies.double()
    for layer in range(config.num_layers):
        weights = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + _attention(config, weights, _norm(x, weights["input_layernorm.weight"], config.rms_eps), angles)
        y = _norm(x, weights["post_attention_layernorm.weight"], config.rms_eps)
        gate, up = y @ weights["mlp.gate_proj.weight"].T, y @ weights["mlp.up_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ weights["mlp.down_proj.weight"].T
    x = _norm(x, tensors["model.norm.weight"], config.rms_eps)
    return x @ tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _attention(config: ModelConfig, weights: Tensors, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    def project(name: str, heads: int) -> torch.Tensor:
        y = x @ weights[f"self_attn.{name}_proj.weight"].T
        if config.attention_bias:
            y = y + weights[f"self_attn.{name}_proj.bias"]
        return y.view(len(x), heads, config.head_dim)

    q, k, v = project("q", config.num_heads), project("k", config.num_kv_heads), project("v", config.num_kv_heads)
    if config.qk_norm:
        q = _norm(q, weights["self_attn.q_norm.weight"], config.rms_eps)
        k = _norm(k, weights["self_attn.k_norm.weight"], config.rms_eps)
    q, k = _rotate(q, angles, config), _rotate(k, angles, config)
    heads = []
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        scores = q[:, head] @ k[:, shared].T / math.sqrt(config.head_dim)
        scores = scores + torch.full_like(scores, -math.inf).triu(1)
        heads.append(scores.softmax(-1) @ v[:, shared])
    return torch.cat(heads, dim=1) @ weights["self_attn.o_proj.weight"].T


def _rotate(x: torch.Tensor, angles: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    magnitude = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    cos, sin = angles.cos()[:, None] * magnitude, angles.sin()[:, None] * magnitude
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
