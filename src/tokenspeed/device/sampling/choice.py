"""Which tokens a row may get at all: grammar masks, bans, bad words. A float32 row of logits is written.

What is taken out for good comes first: ids that are not allowed, tokens outside a grammar. Bans come
last and give way: where a grammar holds and a ban would leave no token, the grammar is obeyed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tokenspeed.device.sampling.draw import Float32Array
from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.table import Int64Array


def allowed_of(words: Int32Array, vocab_size: int) -> BoolArray:
    """bool ``[vocab]`` of a mask, int32 ``[(vocab + 31) // 32]``."""
    bits: BoolArray = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
    return bits


def forbid(logits: Float32Array, allowed: BoolArray) -> None:
    """Take out the tokens that are not allowed."""
    np.copyto(logits, -np.inf, where=~allowed)


def without(logits: Float32Array, banned: Int64Array, *, must_leave: bool) -> None:
    """Take out `banned`; if that would leave nothing and `must_leave`, nothing is taken."""
    if not len(banned):
        return
    before = logits[banned]
    logits[banned] = -np.inf
    if must_leave and not np.isfinite(logits.max()):
        logits[banned] = before


def completing(words: Sequence[Int64Array], tail: Iterable[int]) -> Int64Array:
    """Last tokens of the sequences in `words` whose other tokens end `tail`."""
    found, history = [], np.array([*tail], dtype=np.int64)
    for word in words:
        head = len(word) - 1
        if head == 0 or (len(history) >= head and np.array_equal(history[len(history) - head :], word[:-1])):
            found.append(word[-1])
    return np.array(found, dtype=np.int64)
