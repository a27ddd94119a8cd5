"""How the rows of a batch are sampled, as tensors on the device."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(kw_only=True, eq=False)
class SampleRules:
    """One entry a row; `sampling.draw.draw` says what each does.

    Attributes:
        temperature: float32 ``[m]``; 0: the likeliest token, the first among equals.
        top_k: int32 ``[m]``; 0 keeps all.
        top_p: float64 ``[m]``, in ``(0, 1]``.
        min_p: float32 ``[m]``.
        seeds: int64 ``[m]``, the bits of 64-bit seeds.
        positions: int64 ``[m]``, of the new token; seed and position give the random number, see `sampling.philox`.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
