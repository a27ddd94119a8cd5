"""The sampler for logits on a device draws what the host's draws, with nothing read before the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tokenspeed.device.kernels.registry import KernelSet, kernel_set
from tokenspeed.device.sampling.base import Sampler
from tokenspeed.device.sampling.device_sampler import device_sampler
from tokenspeed.device.sampling.sampler import batch_sampler
from tokenspeed.plane.plan import Sampling, Seat, int32

VOCAB, WIDE = 60, 64
PROMPT, OUTPUT = (3, 4, 5, 5), (7, 7, 8)
ASKED = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8, seed=3),
    "cuts": Sampling(temperature=1.2, top_k=9, top_p=0.8, min_p=0.02, seed=2**63 + 11),
    "bias": Sampling(logit_bias=((9, 4.0), (10, 4.5), (9, 6.0)), temperature=0.5, seed=1),
    "ban": Sampling(banned_until_min=(1, 2), min_new_tokens=5, temperature=2.0, seed=4),
    "penalties": Sampling(repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4),
    "penalties and temperature": Sampling(presence_penalty=1.5, temperature=1.0, seed=8),
}


def seated(sampler: Sampler, asked: Sequence[Sampling]) -> Sampler:
    for slot, one in enumerate(asked):
        history = int32([*PROMPT, *OUTPUT]) if one.uses_history else int32(())
        sampler.seat(Seat(slot=slot, row=slot, rid=f"r{slot}", sampling=one, prompt_len=len(PROMPT), history=history))
    return sampler


def both(asked: Sequence[Sampling]) -> tuple[Sampler, Sampler]:
    on_device = device_sampler(
        slots=len(asked),
        vocab_size=VOCAB,
        kernel=kernel_set(KernelSet.TORCH).sample,
        to_device=lambda array: torch.from_numpy(array.copy()),
    )
    return seated(on_device, asked), seated(batch_sampler(slots=len(asked), vocab_size=VOCAB), asked)


def logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(seed)) * 2


def test_twenty_steps_of_every_rule_in_one_batch_give_the_hosts_tokens() -> None:
    asked = list(ASKED.values())
    on_device, on_host = both(asked)
    slots = np.arange(len(asked))[::-1].copy()
    for step in range(20):
        values, positions = logits(len(asked), step), np.full(len(asked), len(PROMPT) + 3 + step, dtype=np.int64)
        got = on_device.sample(values, slots=slots, positions=positions)
        wanted = on_host.sample(values, slots=slots, positions=positions)
        assert got.tokens.tolist() == wanted.tokens.tolist()
        assert not got.nan.any()
        assert torch.equal(values, logits(len(asked), step))


def test_penalties_look_back_at_what_was_drawn_and_not_at_whoever_sat_there_before() -> None:
    asked = [Sampling(frequency_penalty=2.0)]
    on_device, on_host = both(asked)
    flat = torch.zeros(1, WIDE)
    flat[0, :VOCAB] = torch.linspace(1, 0, VOCAB)

    def drawn(sampler: Sampler) -> list[int]:
        at = (np.array([0]), np.array([9]))
        return [int(sampler.sample(flat, slots=at[0], positions=at[1]).tokens[0]) for _ in range(6)]

    first = drawn(on_device)
    assert first == drawn(on_host)
    assert len(set(first)) == 6
    seated(on_device, asked)
    assert drawn(on_device) == first
    on_device.release(0)
    assert drawn(on_device) == [0] * 6


@pytest.mark.parametrize("one", [ASKED["greedy"], ASKED["cuts"], ASKED["penalties"]])
def test_a_row_that_is_not_a_number_is_named_and_counts_nothing(one: Sampling) -> None:
    on_device, on_host = both([one, one])
    values = logits(2, 1)
    values[0, 40] = float("nan")
    for sampler in (on_device, on_host):
        got = sampler.sample(values, slots=np.array([0, 1]), positions=np.array([9, 9]))
        assert got.nan.tolist() == [True, False]
        assert got.tokens[0] == 0
    again = logits(2, 2)
    at = {"slots": np.array([0, 1]), "positions": np.array([10, 10])}
    assert torch.equal(on_device.sample(again, **at).tokens, on_host.sample(again, **at).tokens)
