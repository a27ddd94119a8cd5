"""Sampling in Triton equals torch's, and torch's the engine's own draw; run by `test_triton_kernels.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenspeed.device.kernels.registry import Kernels, KernelSet, kernel_set
from tokenspeed.device.kernels.sample_rules import SampleRules
from tokenspeed.device.sampling.draw import draw
from tokenspeed.device.sampling.philox import uniforms

BOTH = pytest.mark.parametrize(
    "kernels", [kernel_set(KernelSet.TORCH), kernel_set(KernelSet.TRITON)], ids=["torch", "triton"]
)
VOCAB = 40
RULES = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.9, 0, 1.0, 0.2), (0.8, 20, 0.6, 0.05)]
"""Temperature, top-k, top-p, min-p."""


def rules(each: list[tuple[float, int, float, float]], seeds: list[int], positions: list[int]) -> SampleRules:
    temperature, top_k, top_p, min_p = zip(*each, strict=True)
    return SampleRules(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        min_p=torch.tensor(min_p, dtype=torch.float32),
        seeds=torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)),
        positions=torch.tensor(positions),
    )


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return values.mul(4).round().div(4)  # with ties, at the cuts as well


@BOTH
def test_a_draw_is_the_one_the_engine_makes_on_the_host(kernels: Kernels) -> None:
    rows, seeds = len(RULES), [3, 2**64 - 5, 2**40, 0, 77]
    values, positions = logits(rows), [0, 5, 2**33, 12, 1000]
    tokens, nan = kernels.sample(values, rules(RULES, seeds, positions))
    numbers = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions))
    wanted = [
        draw(values[row].numpy().copy(), number=numbers[row], temperature=t, top_k=k, top_p=p, min_p=m)
        for row, (t, k, p, m) in enumerate(RULES)
    ]
    assert tokens.tolist() == wanted
    assert not nan.any()


@BOTH
def test_no_draw_leaves_the_cut_and_many_draws_reach_all_of_it(kernels: Kernels) -> None:
    values = logits(1)
    kept = (values[0] >= values[0].sort(descending=True).values[1]).nonzero()[:, 0].tolist()
    each = [(50.0, 2, 1.0, 0.0)] * 10
    tokens, _ = kernels.sample(values.expand(10, -1), rules(each, [9] * 10, list(range(10))))
    assert set(tokens.tolist()) == set(kept)


@BOTH
def test_without_a_temperature_the_first_of_the_likeliest_is_taken(kernels: Kernels) -> None:
    values = logits(2)
    values[:, [30, 9, 36]] = 50.0
    tokens, _ = kernels.sample(values, rules([(0.0, 0, 1.0, 0.0), (0.0, 1, 0.1, 0.5)], [1, 2], [0, 0]))
    assert tokens.tolist() == [9, 9]


@BOTH
def test_rows_that_are_not_numbers_are_named_and_get_a_token_of_the_vocabulary(kernels: Kernels) -> None:
    values = logits(5)
    values[0, 39] = float("nan")
    values[1, 3] = float("inf")
    values[2] = float("-inf")
    values[3, 5:] = float("-inf")
    each = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.0, 0, 1.0, 0.0)]
    tokens, nan = kernels.sample(values, rules(each, [1] * 5, [0] * 5))
    assert nan.tolist() == [True, True, True, False, False]
    assert tokens[:3].tolist() == [0, 0, 0]
    assert tokens[3] < 5


@BOTH
def test_a_row_is_drawn_alike_in_any_batch(kernels: Kernels) -> None:
    values, seeds, positions = logits(5), [4] * 5, [1, 2, 3, 4, 5]
    whole, _ = kernels.sample(values, rules(RULES, seeds, positions))
    for row in (1, 4):
        alone, _ = kernels.sample(values[row : row + 1], rules(RULES[row : row + 1], [4], [positions[row]]))
        assert alone.tolist() == [whole[row].item()]
