"""Draw a token from one row of logits cut down by top-k, min-p and top-p.

One row at a time and in fixed order, so that a draw is a function of its row alone and not of the
batch, not even in the last bit. The vocabulary is not sorted unless the likeliest tokens are too few
to decide: a cut is a threshold, and the number drawn is looked up in the order of token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from tokenspeed.plane.table import Int64Array

Float32Array: TypeAlias = npt.NDArray[np.float32]


@attrs.frozen(kw_only=True)
class Draw:
    """How one token is drawn; see `draw`."""

    number: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Drawer(Protocol):
    def __call__(self, rows: Sequence[Float32Array], draws: Sequence[Draw]) -> Int64Array:
        """One token for each row, float32 ``[vocab]``, the largest finite; rows are only read. At least one row.

        A row's token depends on the row and its `Draw` alone.
        """
        ...


def draw_each(rows: Sequence[Float32Array], draws: Sequence[Draw]) -> Int64Array:
    """`Drawer` in numpy, row after row."""
    tokens = [
        draw(
            row.copy(),
            number=how.number,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            min_p=how.min_p,
        )
        for row, how in zip(rows, draws, strict=True)
    ]
    return np.array(tokens, dtype=np.int64)


CANDIDATES = 128
"""Likeliest tokens that top-p looks at before it sorts all."""

BLOCK = 64
"""Weights summed at once when a number is looked up."""


def draw(logits: Float32Array, *, number: float, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """One token of ``softmax(logits / temperature)``, cut by top-k and min-p, then by top-p.

    Top-p is a share of what the other two left. Tokens as likely as the least likely one kept are kept.

    Args:
        logits: float32 ``[vocab]``, the largest finite; may be overwritten.
        number: in ``[0, 1)``; decides which token.
        temperature: above 0.
        top_k: 0 keeps all. top_p: in ``(0, 1]``. min_p: smallest share of the largest probability.
    """
    if not top_k:
        return _find(_weights(logits, temperature=temperature, top_p=top_p, min_p=min_p), number)
    rank = len(logits) - top_k
    kept = np.flatnonzero(logits >= np.partition(logits, rank)[rank])
    return int(kept[_find(_weights(logits[kept], temperature=temperature, top_p=top_p, min_p=min_p), number)])


def _weights(logits: Float32Array, *, temperature: float, top_p: float, min_p: float) -> Float32Array:
    """Unnormalised probabilities, the largest 1, those cut off 0; in place."""
    # Relative to the largest, so that dividing by a small temperature cannot overflow.
    np.subtract(logits, logits.max(), out=logits)
    np.divide(logits, np.float32(temperature), out=logits)
    np.exp(logits, out=logits)
    if min_p > 0:
        logits[logits < np.float32(min_p)] = 0
    if top_p < 1:
        logits[logits < _least_of_mass(logits, top_p)] = 0
    return logits


def _least_of_mass(weights: Float32Array, top_p: float) -> float:
    """The smallest weight of the smallest set of largest weights whose sum reaches `top_p` of all."""
    needed = top_p * float(weights.sum(dtype=np.float64))
    rank = len(weights) - CANDIDATES
    if rank > 0:
        best = np.sort(np.partition(weights, rank)[rank:])[::-1]
        sums = np.cumsum(best, dtype=np.float64)
        if sums[-1] >= needed:
            return float(best[np.searchsorted(sums, needed)])
    best = np.sort(weights)[::-1]
    sums = np.cumsum(best, dtype=np.float64)
    return float(best[min(int(np.searchsorted(sums, needed)), len(best) - 1)])


def _find(weights: Float32Array, number: float) -> int:
    """The first index at which the running sum exceeds the number's share; never one of weight 0.

    By sums of blocks and then within one block: a running sum over a whole vocabulary takes ten times as long.
    """
    whole = len(weights) // BLOCK
    blocks = weights[: whole * BLOCK].reshape(whole, BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(blocks, weights[whole * BLOCK :].sum(dtype=np.float64)))
    # The product may round up to the whole sum, which no running sum exceeds.
    share = min(number * float(ends[-1]), float(np.nextafter(ends[-1], 0.0)))
    block = int(np.searchsorted(ends, share, side="right"))
    first, before = block * BLOCK, float(ends[block - 1]) if block else 0.0
    inside = weights[first : first + BLOCK]
    index = int(np.searchsorted(before + np.cumsum(inside, dtype=np.float64), share, side="right"))
    # The two ways of summing a block may differ in the last bit.
    return first + min(index, int(np.flatnonzero(inside)[-1]))
