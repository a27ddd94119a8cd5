"""Gemma 3 written down again as plainly as possible: one sequence, no cache, no pages, float64.

Shares nothing with the package but the configuration value and the tensors.
"""

from __future__ import annotations

import math

import torch
from dense_llama import Tensors

from tokenspeed.checkpoint.config import ModelConfig


def gemma_logits(config: ModelConfig, tensors: Tensors, ids: list[int]) -> torch.Tensor:
    """Logits of every position, float64 ``[tokens, vocab]``."""
    embedding = tensors["model.embed_tokens.weight"]
    x = embedding[torch.tensor(ids)] * config.embedding_scale
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        w = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        y = _attention(config, w, _norm(x, w["input_layernorm.weight"], config), windowed=layer in config.window_layers)
        x = x + _norm(y, w["post_attention_layernorm.weight"], config)
        y = _norm(x, w["pre_feedforward_layernorm.weight"], config)
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        inner = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        x = x + _norm(inner @ w["mlp.down_proj.weight"].T, w["post_feedforward_layernorm.weight"], config)
    return _norm(x, tensors["model.norm.weight"], config) @ embedding.T


def _norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_eps) * weight


def _attention(config: ModelConfig, w: dict[str, torch.Tensor], x: torch.Tensor, *, windowed: bool) -> torch.Tensor:
    tokens, dim = len(x), config.head_dim
    q = (x @ w["self_attn.q_proj.weight"].T).view(tokens, config.num_heads, dim)
    k = (x @ w["self_attn.k_proj.weight"].T).view(tokens, config.num_kv_heads, dim)
    v = (x @ w["self_attn.v_proj.weight"].T).view(tokens, config.num_kv_heads, dim)
    q = _rotate(_norm(q, w["self_attn.q_norm.weight"], config), config, windowed=windowed)
    k = _rotate(_norm(k, w["self_attn.k_norm.weight"], config), config, windowed=windowed)
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = age >= 0
    if windowed:
        assert config.sliding_window is not None
        seen &= age < config.sliding_window
    heads = []
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        scores = q[:, head] @ k[:, shared].T * config.score_scale
        heads.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, shared])
    return torch.cat(heads, dim=1) @ w["self_attn.o_proj.weight"].T


def _rotate(x: torch.Tensor, config: ModelConfig, *, windowed: bool) -> torch.Tensor:
    theta = config.window_rope_theta if windowed else config.rope_theta
    assert theta is not None
    pairs = torch.arange(0, config.head_dim, 2).double() / config.head_dim
    angles = torch.arange(len(x)).double()[:, None] / theta**pairs
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
