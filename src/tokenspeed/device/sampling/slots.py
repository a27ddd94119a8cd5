"""What the sampler keeps of each slot's request, as columns that a batch is gathered from."""

from __future__ import annotations

from collections import deque

import attrs
import numpy as np
import numpy.typing as npt

from tokenspeed.device.sampling.history import TokenCounts
from tokenspeed.device.sampling.philox import UInt64Array
from tokenspeed.plane.messages import GREEDY_BELOW, BoolArray
from tokenspeed.plane.plan import Sampling, Seat
from tokenspeed.plane.table import Int64Array

_SEED_MASK = (1 << 64) - 1


@attrs.define(eq=False)
class SlotColumns:
    """Writer: the sampler. Arrays have one entry a slot; the dicts only slots that use them.

    Attributes:
        greedy: the likeliest token is taken.
        adjusts: a bias or a penalty changes the logits.
        banned_before: positions below this may not get the ids of `banned`; 0: no ban.
        temperature, min_p, top_p: float64. top_k: 0 is all.
        repetition, frequency, presence: float64, penalties of slots in `counts`.
        allowed: bool ``[vocab]``, the only tokens to draw.
        words: sequences that must not be completed; `tails` are the latest output tokens of those slots,
            as many as the longest sequence looks back.
    """

    greedy: BoolArray
    adjusts: BoolArray
    banned_before: Int64Array
    temperature: npt.NDArray[np.float64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    top_k: Int64Array
    seed: UInt64Array
    repetition: npt.NDArray[np.float64]
    frequency: npt.NDArray[np.float64]
    presence: npt.NDArray[np.float64]
    counts: dict[int, TokenCounts] = attrs.field(factory=dict[int, TokenCounts])
    biases: dict[int, tuple[Int64Array, npt.NDArray[np.float32]]] = attrs.field(
        factory=dict[int, tuple[Int64Array, npt.NDArray[np.float32]]]
    )
    banned: dict[int, Int64Array] = attrs.field(factory=dict[int, Int64Array])
    allowed: dict[int, BoolArray] = attrs.field(factory=dict[int, BoolArray])
    words: dict[int, tuple[Int64Array, ...]] = attrs.field(factory=dict[int, tuple[Int64Array, ...]])
    tails: dict[int, deque[int]] = attrs.field(factory=dict[int, deque[int]])

    def seat(self, seat: Seat, *, vocab_size: int) -> None:
        """Ids that can never be drawn anyway are left out of bias, ban and history."""
        slot, sampling = seat.slot, seat.sampling
        self.release(slot)
        self.greedy[slot] = sampling.temperature < GREEDY_BELOW
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.top_k[slot] = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        self.seed[slot] = sampling.seed & _SEED_MASK
        self.repetition[slot] = sampling.repetition_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        if sampling.uses_penalties:
            self.counts[slot] = TokenCounts.of(seat.history, prompt_len=seat.prompt_len, vocab_size=vocab_size)
        self._bias(slot, sampling, vocab_size)
        banned = [token for token in sampling.banned_until_min if 0 <= token < vocab_size]
        if banned and sampling.min_new_tokens > 0:
            self.banned[slot] = np.array(banned, dtype=np.int64)
            self.banned_before[slot] = seat.prompt_len + sampling.min_new_tokens
        self._restrict(seat, vocab_size)
        self.adjusts[slot] = any(slot in kept for kept in (self.counts, self.biases, self.allowed, self.words))

    def release(self, slot: int) -> None:
        for kept in (self.counts, self.biases, self.banned, self.allowed, self.words, self.tails):
            kept.pop(slot, None)
        self.greedy[slot] = True
        self.adjusts[slot] = False
        self.banned_before[slot] = 0

    def _restrict(self, seat: Seat, vocab_size: int) -> None:
        slot, sampling = seat.slot, seat.sampling
        if sampling.allowed_token_ids:
            allowed = self.allowed[slot] = np.zeros(vocab_size, dtype=np.bool_)
            allowed[[token for token in sampling.allowed_token_ids if token < vocab_size]] = True
        if sampling.bad_words:
            self.words[slot] = tuple(np.array(word, dtype=np.int64) for word in sampling.bad_words)
            longest = max(len(word) for word in sampling.bad_words) - 1
            self.tails[slot] = deque(seat.history[seat.prompt_len :].tolist(), maxlen=longest)

    def drew(self, slot: int, token: int) -> None:
        """The slot's request got a token."""
        if slot in self.counts:
            self.counts[slot].add(token)
        if slot in self.tails:
            self.tails[slot].append(token)

    def _bias(self, slot: int, sampling: Sampling, vocab_size: int) -> None:
        pairs = dict(pair for pair in sampling.logit_bias if 0 <= pair[0] < vocab_size)
        if pairs:
            values = np.fromiter(pairs.values(), dtype=np.float32)
            self.biases[slot] = (np.fromiter(pairs, dtype=np.int64), values)


def slot_columns(slots: int) -> SlotColumns:
    """Nobody sits anywhere."""
    return SlotColumns(
        greedy=np.ones(slots, dtype=np.bool_),
        adjusts=np.zeros(slots, dtype=np.bool_),
        banned_before=np.zeros(slots, dtype=np.int64),
        temperature=np.zeros(slots, dtype=np.float64),
        top_p=np.ones(slots, dtype=np.float64),
        min_p=np.zeros(slots, dtype=np.float64),
        top_k=np.zeros(slots, dtype=np.int64),
        seed=np.zeros(slots, dtype=np.uint64),
        repetition=np.ones(slots, dtype=np.float64),
        frequency=np.zeros(slots, dtype=np.float64),
        presence=np.zeros(slots, dtype=np.float64),
    )
