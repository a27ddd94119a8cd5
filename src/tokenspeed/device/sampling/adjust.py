"""Changes to logits before a token is chosen: bias, the ban of early ends, penalties; in this order."""

from __future__ import annotations

import numpy as np

from tokenspeed.device.sampling.draw import Float32Array
from tokenspeed.device.sampling.slots import SlotColumns


def adjust(logits: Float32Array, columns: SlotColumns, slot: int, position: int) -> None:
    """Write the changes for the request in `slot` into `logits`, float32 ``[vocab]``."""
    if slot in columns.biases:
        ids, values = columns.biases[slot]
        logits[ids] += values
    if position < columns.banned_before[slot]:
        logits[columns.banned[slot]] = -np.inf
    if slot in columns.counts:
        _penalize(logits, columns, slot)


def _penalize(logits: Float32Array, columns: SlotColumns, slot: int) -> None:
    """Repetition (Keskar et al. 2019, arXiv:1909.05858, section 4.1) over prompt and output, which divides
    positive logits and multiplies the others; frequency and presence over the output, which are subtracted.
    """
    repetition, frequency, presence = (
        np.float32(column[slot]) for column in (columns.repetition, columns.frequency, columns.presence)
    )
    ids, generated = columns.counts[slot].known()
    values = logits[ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    logits[ids] = values - frequency * generated.astype(np.float32) - presence * (generated > 0)
