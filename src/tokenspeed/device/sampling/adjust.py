"""Changes to logits before a token is chosen: bias, the ban of early ends, penalties; in this order."""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.device.sampling.slots import SlotColumns
from tokenspeed.plane.table import Int64Array


def adjust_logits(logits: torch.Tensor, columns: SlotColumns, slots: Int64Array, positions: Int64Array) -> None:
    """Write the changes into `logits`, float32 ``[m, vocab]``; `slots` and `positions` are ``[m]``."""
    for row, slot in enumerate(slots.tolist()):
        if slot in columns.biases:
            ids, values = columns.biases[slot]
            logits[row].index_add_(0, torch.from_numpy(ids), torch.from_numpy(values))
    for row in np.flatnonzero(positions < columns.banned_before[slots]).tolist():
        logits[row].index_fill_(0, torch.from_numpy(columns.banned[int(slots[row])]), -torch.inf)
    _penalize(logits, columns, slots)


def _penalize(logits: torch.Tensor, columns: SlotColumns, slots: Int64Array) -> None:
    """Repetition (Keskar et al. 2019, arXiv:1909.05858, section 4.1) over prompt and output, which divides
    positive logits and multiplies the others; frequency and presence over the output, which are subtracted.
    """
    looking = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in columns.counts]
    if not looking:
        return
    known = [columns.counts[slot].known() for _, slot in looking]
    sizes = [len(ids) for ids, _ in known]
    rows = torch.from_numpy(np.repeat(np.array([row for row, _ in looking]), sizes))
    ids = torch.from_numpy(np.concatenate([ids for ids, _ in known]))
    generated = torch.from_numpy(np.concatenate([counts for _, counts in known]))
    repetition, frequency, presence = (
        torch.from_numpy(np.repeat(column[[slot for _, slot in looking]], sizes).astype(np.float32))
        for column in (columns.repetition, columns.frequency, columns.presence)
    )
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, ids] = values - frequency * generated - presence * (generated > 0)
