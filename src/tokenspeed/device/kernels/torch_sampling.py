"""Sampling in terms of torch, with a sort; the reference for the threshold search of other implementations."""

from __future__ import annotations

import torch

from tokenspeed.device.kernels.sample_rules import SampleRules

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def sample(logits: torch.Tensor, rules: SampleRules) -> tuple[torch.Tensor, torch.Tensor]:
    best, tokens = logits.max(dim=1)
    nan = ~best.isfinite()  # the maximum of a row with a NaN is NaN
    hot = rules.temperature > 0
    temperature = torch.where(hot, rules.temperature, 1.0)[:, None]
    weights = torch.exp((logits - torch.where(nan, 0.0, best)[:, None]) / temperature)
    ranked = logits.sort(dim=1, descending=True).values
    rank = torch.where(rules.top_k > 0, rules.top_k, logits.shape[1]).clamp(max=logits.shape[1]).long() - 1
    weights = torch.where(logits >= ranked.gather(1, rank[:, None]), weights, 0.0)
    weights = torch.where(weights < rules.min_p[:, None], 0.0, weights)
    weights = torch.where(weights < _least_of_mass(weights, rules.top_p), 0.0, weights)
    drawn = _find(weights.double(), _uniforms(rules.seeds, rules.positions))
    tokens = torch.where(hot, drawn, tokens)
    return torch.where(nan, 0, tokens), nan


def _least_of_mass(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest weight of the smallest set of largest weights that has `top_p` of all; ``[m, 1]``."""
    ranked = weights.sort(dim=1, descending=True).values
    sums = ranked.double().cumsum(dim=1)
    index = (sums < (top_p * sums[:, -1])[:, None]).sum(dim=1, keepdim=True)
    least = ranked.gather(1, index.clamp(max=weights.shape[1] - 1))
    return torch.where(top_p[:, None] < 1, least, 0.0)


def _find(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum exceeds the number's share; never one of weight 0."""
    sums = weights.cumsum(dim=1)
    index = (sums <= (numbers * sums[:, -1])[:, None]).sum(dim=1)
    places = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(dim=1)
    return torch.minimum(index, last)


def _uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`sampling.philox.uniforms` in int64, whose products have the right bits although they wrap."""
    c0, c1 = positions & _WORD, (positions >> 32) & _WORD
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _WORD) ^ c1 ^ k0, ((first >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return ((c0 >> 5).double() * (1 << 26) + (c1 >> 6).double()) / (1 << 53)
