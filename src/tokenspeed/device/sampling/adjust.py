"""Changes to logits before a token is chosen, in this order.

Bias, processors, penalties; then what takes tokens out: ids that are not allowed, the mask of a grammar,
bans of early ends and of bad words' last tokens. Bans come last and give way: where a grammar holds and
they would leave no token, the grammar is obeyed.
"""

from __future__ import annotations

import numpy as np

from tokenspeed.device.sampling.choice import allowed_of, completing, forbid, without
from tokenspeed.device.sampling.draw import Float32Array
from tokenspeed.device.sampling.processors import Processors
from tokenspeed.device.sampling.slots import SlotColumns
from tokenspeed.plane.messages import Int32Array


def adjust(
    logits: Float32Array,
    columns: SlotColumns,
    slot: int,
    position: int,
    *,
    processors: Processors | None = None,
    mask: Int32Array | None = None,
) -> bool:
    """Write the changes for the request in `slot` into `logits`, float32 ``[vocab]``.

    Args:
        mask: int32 words of the request's grammar; None: no grammar holds it.
    Returns: False: a processor has failed, and there is no token for the request.
    """
    if slot in columns.biases:
        ids, values = columns.biases[slot]
        logits[ids] += values
    if processors is not None and not processors.apply(logits, slot, position):
        return False
    if slot in columns.counts:
        _penalize(logits, columns, slot)
    if slot in columns.allowed:
        forbid(logits, columns.allowed[slot])
    if mask is not None:
        forbid(logits, allowed_of(mask, len(logits)))
    if position < columns.banned_before[slot]:
        without(logits, columns.banned[slot], must_leave=mask is not None)
    if slot in columns.words:
        without(logits, completing(columns.words[slot], columns.tails[slot]), must_leave=mask is not None)
    return True


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
