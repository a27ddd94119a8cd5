"""Random draws: the distribution they follow, and that a draw depends on its row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_rig import chi_square_excess, expected, picked, seated

from tokenspeed.device.sampling.philox import philox4x32, uniforms
from tokenspeed.plane.plan import Sampling

DRAWS = 6000


def row(vocab: int, *, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, ...], wanted: str) -> None:
    """The vectors of Random123, which the authors of the generator publish with it."""
    words = philox4x32(np.array([counter] * 2, dtype=np.uint64).T, np.array([key] * 2, dtype=np.uint64).T)
    for column in words.T.tolist():
        assert " ".join(f"{word:08x}" for word in column) == wanted


def test_uniform_numbers_fill_the_unit_interval_and_differ_by_seed_and_position() -> None:
    seeds = np.repeat(np.array([0, 1, 1 << 63, (1 << 64) - 1], dtype=np.uint64), 5000)
    numbers = uniforms(seeds, np.tile(np.arange(5000), 4))
    assert len(np.unique(numbers)) == 20000
    assert 0 <= numbers.min() < 0.001 < 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    by_seed = numbers.reshape(4, 5000)
    assert np.abs(np.corrcoef(by_seed) - np.eye(4)).max() < 0.05
    assert abs(np.corrcoef(by_seed[0, :-1], by_seed[0, 1:])[0, 1]) < 0.05


COMBINATIONS = {
    "plain": Sampling(temperature=1.0),
    "cool": Sampling(temperature=0.5),
    "hot": Sampling(temperature=3.0),
    "top-k": Sampling(temperature=1.0, top_k=7),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.0, min_p=0.1),
    "top-k and top-p": Sampling(temperature=1.5, top_k=12, top_p=0.7),
    "top-p and min-p": Sampling(temperature=1.5, top_p=0.9, min_p=0.05),
    "everything": Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.02),
    "top-p of a flat row": Sampling(temperature=8.0, top_p=0.95),
    "top-k beyond the candidates": Sampling(temperature=2.0, top_k=150),
}


@pytest.mark.parametrize("sampling", COMBINATIONS.values(), ids=list(COMBINATIONS))
@pytest.mark.parametrize("vocab", [30, 700])
def test_draws_follow_the_probabilities_that_the_parameters_mean(sampling: Sampling, vocab: int) -> None:
    logits = row(vocab)
    sampler = seated(sampling, vocab=vocab)
    positions = np.arange(DRAWS, dtype=np.int64)
    slots = np.zeros(DRAWS, dtype=np.int64)
    tokens = sampler.sample(logits.expand(DRAWS, -1), slots=slots, positions=positions).tokens.numpy()
    counts = np.bincount(tokens, minlength=vocab)
    assert chi_square_excess(counts, expected(logits, sampling)) < 5


def test_the_check_of_distributions_notices_a_wrong_one() -> None:
    logits = row(30)
    tokens = picked(seated(Sampling(temperature=1.0), vocab=30), logits.expand(1, -1), position=0)
    sampler = seated(Sampling(temperature=1.15), vocab=30)
    many = sampler.sample(
        logits.expand(DRAWS, -1), slots=np.zeros(DRAWS, dtype=np.int64), positions=np.arange(DRAWS)
    ).tokens.numpy()
    assert chi_square_excess(np.bincount(many, minlength=30), expected(logits, Sampling(temperature=1.0))) > 5
    assert tokens


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    vocab, count = 5000, 24
    kinds = list(COMBINATIONS.values())
    sampling = [
        Sampling(
            temperature=kinds[i % len(kinds)].temperature if i % 5 else 0.0,
            top_k=kinds[i % len(kinds)].top_k,
            top_p=kinds[i % len(kinds)].top_p,
            min_p=kinds[i % len(kinds)].min_p,
            seed=i * 7919,
        )
        for i in range(count)
    ]
    logits = torch.stack([row(vocab, seed=i) for i in range(count)])
    together = picked(seated(*sampling, vocab=vocab), logits, position=50)
    sampler = seated(*sampling, vocab=vocab)
    assert [picked(sampler, logits[i : i + 1], position=50, slots=[i])[0] for i in range(count)] == together
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    shuffled = picked(sampler, logits[order], position=50, slots=order.tolist())
    assert shuffled == [together[i] for i in order]
    assert picked(sampler, logits, position=51) != together


def test_equal_seeds_repeat_and_seeds_differ_over_all_64_bits() -> None:
    logits = row(1000, spread=0.5).expand(6, -1)
    seeds = (5, 5, -1, (1 << 64) - 1, 1 << 40, 1 << 63)
    sampler = seated(*(Sampling(temperature=1.0, seed=seed) for seed in seeds), vocab=1000)
    runs = [[picked(sampler, logits, position=p)[i] for p in range(12)] for i in range(6)]
    assert runs[0] == runs[1]
    assert runs[2] == runs[3], "a negative seed is its 64-bit pattern"
    assert len({tuple(run) for run in runs}) == 4


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    for sampling in (Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0, top_p=0.6)):
        sampler = seated(sampling, vocab=6)
        seen = {picked(sampler, logits[None], position=p)[0] for p in range(300)}
        assert seen == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-5),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.0, min_p=1.0),
    ],
)
def test_the_narrowest_parameters_take_the_likeliest_token(sampling: Sampling) -> None:
    logits = row(400, spread=30.0)
    sampler = seated(sampling, vocab=400)
    assert {picked(sampler, logits[None], position=p)[0] for p in range(40)} == {int(logits.argmax())}


def test_very_large_logits_and_small_temperatures_do_not_overflow() -> None:
    logits = row(300) * 1e30
    sampler = seated(Sampling(temperature=1e-5), Sampling(temperature=0.3, top_p=0.9), vocab=300)
    assert picked(sampler, logits.expand(2, -1), position=3) == [int(logits.argmax())] * 2


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((200,), -torch.inf)
    logits[[0, 77, 199]] = 0.0
    kinds = (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=50), Sampling(temperature=1.0, top_p=0.999999))
    for sampling in kinds:
        sampler = seated(sampling, vocab=200)
        assert {picked(sampler, logits[None], position=p)[0] for p in range(200)} == {0, 77, 199}
