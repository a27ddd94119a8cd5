"""How long a forward takes on a named accelerator: the slower of its arithmetic and its memory traffic.

The roofline model of Williams, Waterman and Patterson (CACM 52(4), 2009), with shares of the peaks
that well-tuned kernels reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Protocol

import attrs
import numpy as np

from tokenspeed.checkpoint.config import LinearAttention, ModelConfig
from tokenspeed.device.kv.layout import FLOAT_BYTES
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.plane.table import Int64Array
from tokenspeed.settings.model import Accelerator, SimulatedSettings

TERA, GIGA = 1e12, 1e9
KV_BYTES = 2
"""Bytes of one number of the KV cache: half precision."""
STATE_FLOPS = 7.0
"""For one number of a state and one token: decay, read, write and query of `layers.gated_delta`."""


@attrs.frozen(kw_only=True)
class AcceleratorSpec:
    """Peaks as the vendor's data sheet has them: dense half-precision arithmetic, device memory, PCIe.

    Attributes:
        overhead_s: what a forward costs however small it is: launches, synchronisation.
        link_bytes_per_s: to and from its host's memory, one way.
        compute_share, bandwidth_share: of the peaks, reached in practice.
    """

    flops: float
    bytes_per_s: float
    memory_bytes: int
    overhead_s: float
    link_bytes_per_s: float
    compute_share: float = 0.6
    bandwidth_share: float = 0.8


def _spec(*, tflops: float, gb_per_s: float, gb: float, overhead_us: float, link_gb_per_s: float) -> AcceleratorSpec:
    return AcceleratorSpec(
        flops=tflops * TERA,
        bytes_per_s=gb_per_s * GIGA,
        memory_bytes=int(gb * GIGA),
        overhead_s=overhead_us / 1e6,
        link_bytes_per_s=link_gb_per_s * GIGA,
    )


ACCELERATORS: Mapping[Accelerator, AcceleratorSpec] = MappingProxyType(
    {
        Accelerator.H200: _spec(tflops=989, gb_per_s=4800, gb=141, overhead_us=300, link_gb_per_s=64),
        Accelerator.H100: _spec(tflops=989, gb_per_s=3350, gb=80, overhead_us=300, link_gb_per_s=64),
        Accelerator.A100: _spec(tflops=312, gb_per_s=2039, gb=80, overhead_us=300, link_gb_per_s=32),
        Accelerator.L4: _spec(tflops=121, gb_per_s=300, gb=24, overhead_us=300, link_gb_per_s=32),
        Accelerator.TRN2: _spec(tflops=667, gb_per_s=2900, gb=96, overhead_us=500, link_gb_per_s=32),
    }
)


@attrs.frozen(kw_only=True)
class Attending:
    """Layers whose queries see as far.

    Attributes:
        window_tokens: what a query sees, itself included; 0: all before it.
        token_bytes: keys and values of one token in these layers.
        pair_flops: for one token and one token that it sees.
    """

    window_tokens: int
    token_bytes: int
    pair_flops: float

    def seen(self, counts: Int64Array, starts: Int64Array) -> tuple[int, int]:
        """Tokens whose keys and values are read, and pairs of a computed token and one that it sees."""
        if not self.window_tokens:
            return int((starts + counts).sum()), int((counts * starts + counts * (counts + 1) // 2).sum())
        whole = np.clip(self.window_tokens - starts, 0, counts)  # tokens that still see everything before them
        pairs = whole * starts + whole * (whole + 1) // 2 + (counts - whole) * self.window_tokens
        read = np.minimum(starts + counts, counts + self.window_tokens - 1)
        return int(read.sum()), int(pairs.sum())


@attrs.frozen(kw_only=True)
class ModelShape:
    """What the timing model must know of a model.

    Attributes:
        parameters: numbers that every token is multiplied with.
        attention: its layers with keys and values, those that see as far together.
        state_bytes: read and written by every row, over all layers that keep a state.
        state_flops: for one token, over these layers.
    """

    parameters: float
    weight_bytes: int
    attention: tuple[Attending, ...]
    state_bytes: int = 0
    state_flops: float = 0.0


def model_shape(config: ModelConfig, settings: SimulatedSettings) -> ModelShape:
    """The configuration's shape; `simulated.parameters_b` takes the place of its number of parameters."""
    counted = sum(prod(shape) for shape in tensor_shapes(config).values())
    parameters = counted if settings.parameters_b is None else settings.parameters_b * GIGA
    layers = ((0, len(config.full_layers)), (config.sliding_window or 0, len(config.window_layers)))
    states = 0 if config.linear is None else len(config.linear.layers) * _state_numbers(config.linear)
    return ModelShape(
        parameters=parameters,
        weight_bytes=int(parameters * settings.bytes_per_parameter),
        attention=tuple(_attending(config, window, count) for window, count in layers if count),
        state_bytes=states * FLOAT_BYTES,
        state_flops=STATE_FLOPS * states,
    )


def _attending(config: ModelConfig, window_tokens: int, layers: int) -> Attending:
    return Attending(
        window_tokens=window_tokens,
        token_bytes=layers * 2 * config.num_kv_heads * config.head_dim * KV_BYTES,
        pair_flops=4.0 * layers * config.num_heads * config.head_dim,
    )


def _state_numbers(linear: LinearAttention) -> int:
    return linear.heads * linear.key_dim * linear.value_dim


class StepTime(Protocol):
    """Seconds of one forward."""

    def seconds(self, counts: Int64Array, starts: Int64Array) -> float:
        """
        Args:
            counts: tokens computed of each row.
            starts: tokens of each row before those.
        """
        ...


@attrs.frozen(kw_only=True)
class Roofline:
    """`StepTime` of a model on an accelerator."""

    accelerator: AcceleratorSpec
    shape: ModelShape

    def seconds(self, counts: Int64Array, starts: Int64Array) -> float:
        chip, shape, tokens = self.accelerator, self.shape, int(counts.sum())
        flops = (2.0 * shape.parameters + shape.state_flops) * tokens
        moved = shape.weight_bytes + 2 * shape.state_bytes * len(counts)
        for layers in shape.attention:
            read, pairs = layers.seen(counts, starts)
            flops += layers.pair_flops * pairs
            moved += layers.token_bytes * (read + tokens)
        arithmetic = flops / (chip.flops * chip.compute_share)
        traffic = moved / (chip.bytes_per_s * chip.bandwidth_share)
        return chip.overhead_s + max(arithmetic, traffic)


@attrs.frozen
class FixedStep:
    """`StepTime` that does not depend on the work."""

    step_s: float

    def seconds(self, counts: Int64Array, starts: Int64Array) -> float:
        return self.step_s


def step_time(config: ModelConfig, settings: SimulatedSettings) -> StepTime:
    """What the settings ask for: a fixed time, or the named accelerator's roofline."""
    if settings.step_ms is not None:
        return FixedStep(settings.step_ms / 1e3)
    return Roofline(accelerator=ACCELERATORS[settings.accelerator], shape=model_shape(config, settings))
