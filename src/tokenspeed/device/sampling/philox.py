"""Philox4x32-10, a counter-based random generator.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.
A number is a function of (key, counter) with no state between, so a draw that takes its key from the
request's seed and its counter from the position is the same in every batch and after every recompute.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tokenspeed.plane.table import Int64Array

UInt64Array: TypeAlias = npt.NDArray[np.uint64]
"""Holds 32-bit words: products of two fit."""

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_WORD = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Four random words for each counter.

    Args:
        counter: uint64 ``[4, n]``, 32-bit words; `key` likewise ``[2, n]``.
    Returns: uint64 ``[4, n]``, 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _BITS) ^ c1 ^ k0, second & _WORD, (first >> _BITS) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: UInt64Array, positions: Int64Array) -> npt.NDArray[np.float64]:
    """One number in ``[0, 1)``, 53 random bits, for each (seed, position).

    Args:
        seeds: uint64 ``[n]``.
        positions: int64 ``[n]``, not negative.
    """
    at = positions.astype(np.uint64)
    none = np.zeros_like(at)
    words = philox4x32(np.stack((at & _WORD, at >> _BITS, none, none)), np.stack((seeds & _WORD, seeds >> _BITS)))
    high, low = (words[0] >> np.uint64(5)).astype(np.float64), (words[1] >> np.uint64(6)).astype(np.float64)
    return np.asarray((high * (1 << 26) + low) / (1 << 53), dtype=np.float64)
