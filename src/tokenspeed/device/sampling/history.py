"""Which tokens a request has seen, for the penalties that look back."""

from __future__ import annotations

from typing import Self

import attrs
import numpy as np

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.table import Int64Array


@attrs.define(eq=False)
class TokenCounts:
    """The distinct tokens of one request, and how often each was generated.

    Attributes:
        places: token id to index in the two arrays, which have room for more than `size`.
        ids: int64, tokens of prompt or output.
        generated: int32, occurrences in the output; 0: in the prompt only.
    """

    places: dict[int, int]
    ids: Int64Array
    generated: Int32Array
    size: int

    @classmethod
    def of(cls, history: Int32Array, *, prompt_len: int, vocab_size: int) -> Self:
        """Count `history`, whose first `prompt_len` tokens are the prompt; ids beyond the vocabulary are dropped."""
        output = history[prompt_len:]
        ids = np.unique(history[(history >= 0) & (history < vocab_size)]).astype(np.int64)
        generated = np.zeros(len(ids), dtype=np.int32)
        again, counts = np.unique(output[np.isin(output, ids)], return_counts=True)
        generated[np.searchsorted(ids, again)] = counts
        places = {token: place for place, token in enumerate(ids.tolist())}
        return cls(places=places, ids=ids, generated=generated, size=len(ids))

    def add(self, token: int) -> None:
        """`token` was generated."""
        place = self.places.get(token)
        if place is None:
            if self.size == len(self.ids):
                self.ids = np.concatenate((self.ids, np.zeros(max(64, self.size), dtype=np.int64)))
                self.generated = np.concatenate((self.generated, np.zeros(max(64, self.size), dtype=np.int32)))
            place = self.places[token] = self.size
            self.ids[place] = token
            self.size += 1
        self.generated[place] += 1

    def known(self) -> tuple[Int64Array, Int32Array]:
        """Views of the distinct tokens and their counts; the next `add` may change them."""
        return self.ids[: self.size], self.generated[: self.size]
