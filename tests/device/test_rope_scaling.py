"""Rotary frequencies against the published formulas, and against values other software computes."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from tokenspeed.checkpoint.config import ModelConfig, RopeKind, RopeScaling
from tokenspeed.checkpoint.random_models import RANDOM_MODELS
from tokenspeed.device.layers.rope import pair_rows, rope_frequencies, rope_turns
from tokenspeed.device.weights.gguf_source import halve_rows
from tokenspeed.errors import ModelError

LLAMA3 = RopeScaling(
    kind=RopeKind.LLAMA3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
YARN = RopeScaling(kind=RopeKind.YARN, factor=4.0, original_max_positions=32768, attention_factor=1.138629436)
YARN_FINE = attrs.evolve(YARN, factor=16.0, original_max_positions=4096, beta_fast=16.0, beta_slow=2.0, truncate=False)


def config(head_dim: int, theta: float, scaling: RopeScaling | None) -> ModelConfig:
    return attrs.evolve(RANDOM_MODELS["tiny-llama"], head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)


def plain(head_dim: int, theta: float) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def near(got: torch.Tensor, wanted: list[float]) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64), rtol=2e-6, atol=0)


def test_plain_frequencies_fall_by_powers_of_theta() -> None:
    near(rope_frequencies(config(64, 100000.0, None)), plain(64, 100000.0))


def test_linear_scaling_divides_every_frequency() -> None:
    scaling = RopeScaling(kind=RopeKind.LINEAR, factor=4.0)
    near(rope_frequencies(config(16, 10000.0, scaling)), [f / 4 for f in plain(16, 10000.0)])


def test_frequency_factors_divide_one_frequency_each() -> None:
    factors = tuple(1.0 + i for i in range(8))
    scaling = RopeScaling(kind=RopeKind.FACTORS, frequency_factors=factors)
    near(
        rope_frequencies(config(16, 10000.0, scaling)),
        [f / factor for f, factor in zip(plain(16, 10000.0), factors, strict=True)],
    )


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    wanted = []
    for frequency in plain(128, 500000.0):
        wave = 2 * math.pi / frequency
        if wave < 8192 / 4:
            wanted.append(frequency)
        elif wave > 8192 / 1:
            wanted.append(frequency / 8)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            wanted.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert len({round(w / f, 3) for w, f in zip(wanted, plain(128, 500000.0), strict=True)}) > 4
    near(rope_frequencies(config(128, 500000.0, LLAMA3)), wanted)


@pytest.mark.parametrize("scaling", [YARN, YARN_FINE], ids=["rounded bounds", "exact bounds"])
def test_yarn_blends_between_the_pairs_of_beta_fast_and_beta_slow_turns(scaling: RopeScaling) -> None:
    theta, dim = 10000.0, 64

    def pair(turns: float) -> float:
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    wanted = []
    for index, frequency in enumerate(plain(dim, theta)):
        ramp = min(max((index - low) / (high - low), 0.0), 1.0)
        wanted.append(frequency / scaling.factor * ramp + frequency * (1 - ramp))
    near(rope_frequencies(config(dim, theta, scaling)), wanted)


@pytest.mark.parametrize(
    ("scaling", "theta", "wanted"),
    [
        (
            LLAMA3,
            500000.0,
            (
                "1.0 0.4403666 0.1939228 0.0853971 0.03760603 0.01656044 0.007292665 0.003211446 0.000524846"
                " 7.784655e-05 3.428102e-05 1.509622e-05 6.64787e-06 2.9275e-06 1.289173e-06 5.677088e-07"
            ),
        ),
        (
            YARN,
            1000000.0,
            (
                "1.0 0.4216965 0.1778279 0.07498942 0.03162278 0.01333521 0.004779901 0.001659962 0.00055 0.0001686786"
                " 4.445699e-05 1.874736e-05 7.905694e-06 3.333804e-06 1.405853e-06 5.928434e-07"
            ),
        ),
        (
            YARN_FINE,
            10000.0,
            (
                "1.0 0.5623413 0.3162278 0.1778279 0.1 0.05623413 0.03162278 0.01519945 0.005952024 0.001887649"
                " 0.0002408111 0.0001111425 6.25e-05 3.514633e-05 1.976424e-05 1.111425e-05"
            ),
        ),
    ],
    ids=["llama3", "yarn", "yarn exact bounds"],
)
def test_frequencies_equal_those_of_transformers(scaling: RopeScaling, theta: float, wanted: str) -> None:
    """Printed by ``modeling_rope_utils.ROPE_INIT_FUNCTIONS`` of transformers 5.24.0 for a head of 32."""
    near(rope_frequencies(config(32, theta, scaling)), [float(word) for word in wanted.split()])


def test_turns_are_unit_numbers_times_the_magnitude() -> None:
    frequencies, positions = torch.tensor([1.0, 0.25]), torch.tensor([0, 3, 1000])
    turns = rope_turns(frequencies, positions, 1.25)
    assert turns.shape == (3, 1, 2)
    for i, position in enumerate((0, 3, 1000)):
        for j, frequency in enumerate((1.0, 0.25)):
            angle = position * frequency
            assert turns[i, 0, j].item() == pytest.approx(1.25 * complex(math.cos(angle), math.sin(angle)), abs=1e-5)


def test_pairing_and_halving_rows_undo_each_other_and_put_partners_together() -> None:
    weight = torch.arange(24.0).view(12, 2)  # two heads of 6
    paired = pair_rows(weight, 2)
    assert paired[:, 0].tolist() == [0, 6, 2, 8, 4, 10, 12, 18, 14, 20, 16, 22]
    assert torch.equal(halve_rows(paired, 2), weight)
    assert pair_rows(torch.arange(6.0), 1).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        (attrs.evolve(LLAMA3, original_max_positions=0), "llama3: original_max_positions 0"),
        (attrs.evolve(LLAMA3, low_freq_factor=4.0), "low_freq_factor 4.0"),
        (attrs.evolve(YARN, factor=0.0), "yarn: .* factor 0.0"),
        (attrs.evolve(YARN, original_max_positions=0), "yarn: original_max_positions 0"),
        (RopeScaling(kind=RopeKind.FACTORS, frequency_factors=(1.0,)), "1 values, the head has 8 pairs"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused_by_name(scaling: RopeScaling, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        rope_frequencies(config(16, 10000.0, scaling))
