"""A sampler with requests seated in it, and the probabilities its rules should give, worked out anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenspeed.device.sampling.sampler import BatchSampler, batch_sampler
from tokenspeed.plane.plan import Sampling, Seat, int32


def seated(
    *sampling: Sampling,
    vocab: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    prompt_len: int | None = None,
) -> BatchSampler:
    """Request i sits in slot i; all have the same prompt and output so far."""
    sampler = batch_sampler(slots=len(sampling), vocab_size=vocab)
    for slot, one in enumerate(sampling):
        history = int32([*prompt, *output]) if one.uses_history else int32(())
        length = len(prompt) if prompt_len is None else prompt_len
        sampler.seat(Seat(slot=slot, row=slot, rid=f"r{slot}", sampling=one, prompt_len=length, history=history))
    return sampler


def picked(
    sampler: BatchSampler, logits: torch.Tensor, *, position: int, slots: Sequence[int] | None = None
) -> list[int]:
    """One token for each row of `logits`; row i belongs to slot i, or to ``slots[i]``."""
    chosen = np.arange(len(logits)) if slots is None else np.array(slots, dtype=np.int64)
    result = sampler.sample(logits, slots=chosen, positions=np.full(len(logits), position, dtype=np.int64))
    assert not result.nan.any()
    return result.tokens.tolist()


def expected(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """Probabilities of one row in float64, by full sorts."""
    probs = torch.softmax(logits.double() / sampling.temperature, dim=-1).numpy()
    if sampling.top_k:
        probs[probs < np.sort(probs)[-min(sampling.top_k, len(probs))]] = 0
    if sampling.min_p:
        probs[probs < sampling.min_p * probs.max()] = 0
    probs /= probs.sum()
    if sampling.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= sampling.top_p]] = 0
    return probs / probs.sum()


def chi_square_excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic is above its mean; rare tokens are pooled."""
    assert counts[probs == 0].sum() == 0, "a token was drawn that was cut off"
    wanted = probs * counts.sum()
    often = wanted >= 8
    got = np.append(counts[often], counts[~often].sum())
    wanted = np.append(wanted[often], wanted[~often].sum())
    if wanted[-1] == 0:
        got, wanted = got[:-1], wanted[:-1]
    freedom = len(got) - 1
    assert freedom > 0
    statistic = float((((got - wanted) ** 2) / wanted).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5
