"""Weights that are drawn instead of read: the same seed gives the same model on every machine."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection

import attrs
import numpy as np
import torch

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.weights.shapes import EMBEDDING, NORM, Shape, tensor_shapes

_GAIN = 3.0
"""How much more the layers add than ones of unit gain would, so that the text depends on its context."""


@attrs.frozen(eq=False)
class RandomSource:
    """See `TensorSource`. Uniform values; norms near 1, biases small, matrices scaled to their width."""

    seed: int
    config: ModelConfig

    @property
    def where(self) -> str:
        return f"random weights, seed {self.seed}"

    @property
    def stored_as(self) -> str:
        return "float32"

    def called(self, name: str) -> str:
        return name

    def file_of(self, called: str) -> str:
        return self.where

    def shape(self, name: str) -> Shape | None:
        return tensor_shapes(self.config).get(name)

    def unexpected(self, names: Collection[str]) -> list[str]:
        return [name for name in tensor_shapes(self.config) if name not in names]

    def read(self, name: str) -> torch.Tensor:
        shape = tensor_shapes(self.config)[name]
        seeds = [self.seed & 0xFFFFFFFF, zlib.crc32(name.encode())]
        # The legacy generator, because its stream never changes between numpy releases.
        values = np.random.RandomState(seeds).random_sample(shape) * 2 - 1
        center, reach = _range(name, shape, self.config)
        return torch.from_numpy((center + reach * values).astype(np.float32))


def _range(name: str, shape: Shape, config: ModelConfig) -> tuple[float, float]:
    """Middle and half-width of the values of one tensor."""
    if name == NORM:
        return 0.0, math.sqrt(3.0)  # of both signs: else the logits of a tied embedding favour the last token
    if "norm" in name:
        return 1.0, 0.2
    if name.endswith((".bias", ".dt_bias")):
        return 0.0, 0.2
    if name.endswith(".A_log"):
        return -2.5, 1.5  # states that forget within tens of tokens, and others within hundreds
    spread = 1.0 / config.embedding_scale if name == EMBEDDING else 1.0 / math.sqrt(shape[1])
    gain = _GAIN if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
    return 0.0, math.sqrt(3.0) * gain * spread
