"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its extensions to longer contexts."""

from __future__ import annotations

import math
from typing import assert_never

import attrs
import torch

from tokenspeed.checkpoint.config import ModelConfig, RopeKind, RopeScaling
from tokenspeed.errors import ModelError


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians that pair i of a head turns for each position; float32 ``[head_dim / 2]``.

    Raises: ModelError: the scaling's parameters cannot be used.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case RopeKind.LINEAR:
            return plain / scaling.factor
        case RopeKind.LLAMA3:
            return _llama3(plain, scaling)
        case RopeKind.YARN:
            return _yarn(plain, scaling, theta=config.rope_theta)
        case RopeKind.FACTORS:
            return _by_factors(plain, scaling)
        case other:
            assert_never(other)


def window_rope(config: ModelConfig) -> ModelConfig:
    """`config` with the rotary settings of its window layers in place of those of the others."""
    theta = config.rope_theta if config.window_rope_theta is None else config.window_rope_theta
    return attrs.evolve(config, rope_theta=theta, rope_scaling=None)


def rope_turns(frequencies: torch.Tensor, positions: torch.Tensor, magnitude: float) -> torch.Tensor:
    """What `RotaryKernel` multiplies by: ``magnitude * exp(i * position * frequency)``.

    Args:
        positions: int64 ``[T]``.
        magnitude: YARN's attention factor; 1.0 elsewhere.
    Returns: complex64 ``[T, 1, head_dim / 2]``.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    turns = torch.complex(angles.cos(), angles.sin())
    return (turns if magnitude == 1.0 else turns * magnitude)[:, None]


def pair_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from halves (i with i + head_dim / 2) to pairs (2i with 2i + 1).

    Checkpoints keep halves; `RotaryKernel` turns pairs. Queries and keys reordered alike have the
    same products, so nothing else notices. First dimension ``heads * head_dim``, any others.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, a linear blend between.

    Source: Llama 3.1 reference code, ``apply_scaling`` (meta-llama/llama-models, models/llama3).
    """
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    if original < 1 or high <= low:
        raise ModelError(
            f"rope scaling llama3: original_max_positions {original} must be positive and"
            f" high_freq_factor {high} above low_freq_factor {low}"
        )
    waves = original * plain / (2 * math.pi)  # turns within the original context
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor


def _yarn(plain: torch.Tensor, scaling: RopeScaling, *, theta: float) -> torch.Tensor:
    """Pairs with many turns in the original context are kept, those with few are stretched by `factor`.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2 ("NTK-by-parts"); the ramp runs over pair
    indices, as in the authors' code.
    """
    original, pairs = scaling.original_max_positions, len(plain)
    if original < 1 or scaling.factor <= 0 or theta <= 1:
        raise ModelError(
            f"rope scaling yarn: original_max_positions {original}, factor {scaling.factor} must be"
            f" positive and rope_theta {theta} above 1"
        )

    def pair_of(turns: float) -> float:
        """The pair that turns so many times within the original context."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001  # a step, without dividing by 0
    stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - stretched) * plain + stretched * plain / scaling.factor


def _by_factors(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if len(scaling.frequency_factors) != len(plain):
        raise ModelError(
            f"rope frequency factors: {len(scaling.frequency_factors)} values, the head has {len(plain)} pairs"
        )
    return plain / torch.tensor(scaling.frequency_factors, dtype=torch.float32)
