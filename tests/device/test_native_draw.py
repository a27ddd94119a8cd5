"""Tokens drawn in C: the same as numpy's, a function of the row alone, and never one that was cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tokenspeed.device.native.draw import ROW, NativeDrawer, sampler_of
from tokenspeed.device.native.library import native_library
from tokenspeed.device.native.model import NativeModel
from tokenspeed.device.sampling.draw import Draw, Float32Array, draw_each
from tokenspeed.device.sampling.sampler import batch_sampler
from tokenspeed.settings.model import WeightsMode


def drawer(threads: int = 2) -> NativeDrawer:
    return NativeDrawer(library=native_library(), threads=threads)


def rows(vocab: int, count: int, *, seed: int, scale: float = 3.0) -> list[Float32Array]:
    rng = np.random.default_rng(seed)
    made = [(rng.standard_normal(vocab) * scale).astype(np.float32) for _ in range(count)]
    made[0][rng.integers(0, vocab, vocab // 3)] = -np.inf
    made[0][0] = 0.0
    return made


def draws(count: int, *, seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> list[Draw]:
    numbers = np.random.default_rng(seed).random(count).tolist()
    return [Draw(number=number, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for number in numbers]


@pytest.mark.parametrize("vocab", [7, 64, 65, 1000, 20_011])
def test_tokens_are_those_of_the_plain_drawer(vocab: int) -> None:
    native = drawer()
    for at, (top_k, top_p, min_p, heat) in enumerate(
        itertools.product((0, 1, 5, 40, 700), (1.0, 0.95, 0.3), (0.0, 0.05), (0.05, 0.7, 2.0))
    ):
        cut = top_k if top_k < vocab else 0
        lines = rows(vocab, 3, seed=at)
        how = draws(3, seed=at, temperature=heat, top_k=cut, top_p=top_p, min_p=min_p)
        assert native(lines, how).tolist() == draw_each(lines, how).tolist(), (top_k, top_p, min_p, heat)


def test_a_token_does_not_depend_on_other_rows_or_threads() -> None:
    lines = rows(5000, 9, seed=1)
    how = draws(9, seed=2, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
    together = drawer()(lines, how).tolist()
    assert [int(drawer(1)([line], [one])[0]) for line, one in zip(lines, how, strict=True)] == together
    assert drawer(3)(lines[::-1], how[::-1]).tolist() == together[::-1]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    how = draws(4000, seed=3, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    counts = np.bincount(drawer()([logits] * 4000, how), minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_banned_tokens_and_those_without_weight_are_never_drawn(number: float) -> None:
    logits = np.full(200, -np.inf, dtype=np.float32)
    logits[[60, 130]] = (2.0, 1.0)
    logits[199] = -500.0
    for top_k, top_p in itertools.product((0, 2, 3), (1.0, 0.99)):
        how = Draw(number=number, temperature=1.0, top_k=top_k, top_p=top_p, min_p=0.0)
        assert int(drawer()([logits], [how])[0]) in (60, 130)


def test_rows_are_only_read() -> None:
    lines = rows(300, 2, seed=5)
    before = [line.copy() for line in lines]
    drawer()(lines, draws(2, seed=1, temperature=0.5, top_k=9, top_p=0.5, min_p=0.1))
    assert all(np.array_equal(a, b) for a, b in zip(lines, before, strict=True))


def test_the_row_of_the_call_is_laid_out_as_in_c() -> None:
    assert [ROW.fields[name][1] for name in ROW.names] == [0, 8, 16, 24, 32, 36, 40]  # type: ignore[index,union-attr]
    assert ROW.itemsize == 48


def test_a_native_model_is_sampled_in_c_and_others_in_numpy() -> None:
    model = NativeModel(library=native_library(), mode=WeightsMode.EXACT, threads=2)
    made = sampler_of(model)(slots=2, vocab_size=10)
    assert isinstance(made.drawer, NativeDrawer)  # type: ignore[attr-defined]
    assert batch_sampler(slots=2, vocab_size=10).drawer is draw_each
