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

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.settings.model import Accelerator, SimulatedSettings

TERA, GIGA = 1e12, 1e9
KV_BYTES = 2
"""Bytes of one number of the KV cache: half precision."""


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
class ModelShape:
    """What the timing model must know of a model.

    Attributes:
        parameters: numbers that every token is multiplied with.
        attention_flops: for one token and one token of its context, over all layers.
    """

    parameters: float
    weight_bytes: int
    kv_bytes_per_token: int
    attention_flops: float


def model_shape(config: ModelConfig, settings: SimulatedSettings) -> ModelShape:
    """The configuration's shape; `simulated.parameters_b` takes the place of its number of parameters."""
    counted = sum(prod(shape) for shape in tensor_shapes(config).values())
    parameters = counted if settings.parameters_b is None else settings.parameters_b * GIGA
    return ModelShape(
        parameters=parameters,
        weight_bytes=int(parameters * settings.bytes_per_parameter),
        kv_bytes_per_token=config.num_layers * 2 * config.num_kv_heads * config.head_dim * KV_BYTES,
        attention_flops=4.0 * config.num_layers * config.num_heads * config.head_dim,
    )


class StepTime(Protocol):
    """Seconds of one forward."""

    def seconds(self, *, tokens: int, context_tokens: int, attended: int) -> float:
        """
        Args:
            tokens: computed by the forward.
            context_tokens: whose keys and values it reads: the rows' contexts, added up.
            attended: pairs of a computed token and a token it attends to.
        """
        ...


@attrs.frozen(kw_only=True)
class Roofline:
    """`StepTime` of a model on an accelerator."""

    accelerator: AcceleratorSpec
    shape: ModelShape

    def seconds(self, *, tokens: int, context_tokens: int, attended: int) -> float:
        chip, shape = self.accelerator, self.shape
        flops = 2.0 * shape.parameters * tokens + shape.attention_flops * attended
        moved = shape.weight_bytes + shape.kv_bytes_per_token * (context_tokens + tokens)
        arithmetic = flops / (chip.flops * chip.compute_share)
        traffic = moved / (chip.bytes_per_s * chip.bandwidth_share)
        return chip.overhead_s + max(arithmetic, traffic)


@attrs.frozen
class FixedStep:
    """`StepTime` that does not depend on the work."""

    step_s: float

    def seconds(self, *, tokens: int, context_tokens: int, attended: int) -> float:
        return self.step_s


def step_time(config: ModelConfig, settings: SimulatedSettings) -> StepTime:
    """What the settings ask for: a fixed time, or the named accelerator's roofline."""
    if settings.step_ms is not None:
        return FixedStep(settings.step_ms / 1e3)
    return Roofline(accelerator=ACCELERATORS[settings.accelerator], shape=model_shape(config, settings))
