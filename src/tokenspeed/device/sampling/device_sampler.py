"""The sampler for logits on the device: nothing of a step comes to the host before its result does.

Rules of the rows go to the device as one small copy; a kernel draws all rows at once. What changes
logits before, for rows that ask for it, are operations on the device without a look at a value.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import torch

from tokenspeed.device.backends.base import HostArray
from tokenspeed.device.kernels.registry import SampleKernel
from tokenspeed.device.kernels.sample_rules import SampleRules
from tokenspeed.device.sampling.base import SampledTokens, TokenMasks
from tokenspeed.device.sampling.slots import SlotColumns, slot_columns
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array

RULES = 6
"""Rows of the array that carries the rules."""


@attrs.frozen(kw_only=True, eq=False)
class DeviceCounts:
    """Tokens that one request has seen.

    Attributes:
        seen: bool ``[vocab]``, in prompt or output.
        generated: int32 ``[vocab]``, occurrences in the output.
    """

    seen: torch.Tensor
    generated: torch.Tensor


@attrs.define(eq=False)
class DeviceSlots:
    """Writer: the sampler. On the device, of slots that use them."""

    counts: dict[int, DeviceCounts] = attrs.field(factory=dict[int, DeviceCounts])
    biases: dict[int, tuple[torch.Tensor, torch.Tensor]] = attrs.field(
        factory=dict[int, tuple[torch.Tensor, torch.Tensor]]
    )
    banned: dict[int, torch.Tensor] = attrs.field(factory=dict[int, torch.Tensor])
    allowed: dict[int, torch.Tensor] = attrs.field(factory=dict[int, torch.Tensor])
    words: dict[int, tuple[torch.Tensor, ...]] = attrs.field(factory=dict[int, tuple[torch.Tensor, ...]])
    tails: dict[int, torch.Tensor] = attrs.field(factory=dict[int, torch.Tensor])


@attrs.frozen(kw_only=True, eq=False)
class DeviceSampler:
    """`sampling.base.Sampler`. Build it with `device_sampler`.

    A row's token depends on its logits, request and position alone, as with `BatchSampler`.

    Attributes:
        vocab_size: ids from here on are never drawn, though logits may be wider.
        columns: what the host knows of each slot; its histories are not counted on.
    """

    vocab_size: int
    columns: SlotColumns
    slots: DeviceSlots = attrs.field(factory=DeviceSlots)
    kernel: SampleKernel
    to_device: Callable[[HostArray], torch.Tensor]

    def seat(self, seat: Seat) -> None:
        slot, columns, to_device = seat.slot, self.columns, self.to_device
        self.release(slot)
        columns.seat(seat, vocab_size=self.vocab_size)
        if slot in columns.biases:
            ids, values = columns.biases[slot]
            self.slots.biases[slot] = (to_device(ids), to_device(values))
        if slot in columns.banned:
            self.slots.banned[slot] = to_device(columns.banned[slot])
        if slot in columns.allowed:
            self.slots.allowed[slot] = to_device(columns.allowed[slot])
        if slot in columns.words:
            self.slots.words[slot] = tuple(to_device(word) for word in columns.words[slot])
            longest, known = columns.tails[slot].maxlen or 0, np.array([*columns.tails[slot]], dtype=np.int64)
            self.slots.tails[slot] = to_device(np.concatenate((np.full(longest - len(known), -1), known)))
        if slot in columns.counts:
            ids, generated = columns.counts[slot].known()
            counts = np.zeros(self.vocab_size, dtype=np.int32)
            seen = np.zeros(self.vocab_size, dtype=np.bool_)
            counts[ids], seen[ids] = generated, True
            self.slots.counts[slot] = DeviceCounts(seen=to_device(seen), generated=to_device(counts))

    def release(self, slot: int) -> None:
        self.columns.release(slot)
        kept = self.slots
        for held in (kept.counts, kept.biases, kept.banned, kept.allowed, kept.words, kept.tails):
            held.pop(slot, None)

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        columns, values = self.columns, logits[:, : self.vocab_size]
        changes = columns.adjusts[slots] | (positions < columns.banned_before[slots])
        held: dict[int, torch.Tensor] = {}
        if masks is not None:
            allowed = bits_of(self.to_device(masks.words), self.vocab_size)
            held = {row: allowed[at] for at, row in enumerate(masks.rows.tolist())}
            changes[masks.rows] = True
        if changes.any():
            values = values.clone()
            for row in np.flatnonzero(changes).tolist():
                self._adjust(values[row], int(slots[row]), int(positions[row]), held.get(row))
        tokens, nan = self.kernel(values, self._rules(slots, positions))
        for row, slot in enumerate(slots.tolist()):
            if slot in self.slots.counts:
                self._count(self.slots.counts[slot], tokens[row : row + 1], nan[row : row + 1])
            if slot in self.slots.tails:
                tail = torch.cat((self.slots.tails[slot], tokens[row : row + 1]))[1:]
                self.slots.tails[slot] = tail
        return SampledTokens(tokens=tokens, nan=nan)

    def _rules(self, slots: Int64Array, positions: Int64Array) -> SampleRules:
        """One copy of int64 ``[RULES, m]``: numbers with a point as the bits of float64."""
        columns = self.columns
        packed = np.empty((RULES, len(slots)), dtype=np.int64)
        fractions = packed.view(np.float64)
        fractions[0] = np.where(columns.greedy[slots], 0.0, columns.temperature[slots])
        fractions[1], fractions[2] = columns.top_p[slots], columns.min_p[slots]
        packed[3], packed[4], packed[5] = columns.top_k[slots], columns.seed[slots].view(np.int64), positions
        there = self.to_device(packed)
        numbers = there.view(torch.float64)
        return SampleRules(
            temperature=numbers[0].float(),
            top_p=numbers[1],
            min_p=numbers[2].float(),
            top_k=there[3].int(),
            seeds=there[4],
            positions=there[5],
        )

    def _adjust(self, logits: torch.Tensor, slot: int, position: int, allowed: torch.Tensor | None) -> None:
        """As `sampling.adjust.adjust`, in place; `allowed`, bool ``[vocab]``, is a grammar's."""
        columns, kept = self.columns, self.slots
        if slot in kept.biases:
            logits.index_add_(0, *kept.biases[slot])
        if slot in kept.counts:
            counts, repetition = kept.counts[slot], float(columns.repetition[slot])
            repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits.copy_(torch.where(counts.seen, repeated, logits))
            logits.sub_(counts.generated * float(columns.frequency[slot]))
            logits.sub_((counts.generated > 0) * float(columns.presence[slot]))
        if slot in kept.allowed:
            logits.masked_fill_(~kept.allowed[slot], float("-inf"))
        if allowed is not None:
            logits.masked_fill_(~allowed, float("-inf"))
        if position < columns.banned_before[slot]:
            self._ban(logits, logits.index_fill(0, kept.banned[slot], float("-inf")), must_leave=allowed is not None)
        if slot in kept.words:
            self._ban(logits, self._uncompleted(logits, slot), must_leave=allowed is not None)

    def _ban(self, logits: torch.Tensor, without: torch.Tensor, *, must_leave: bool) -> None:
        """Take `without` for `logits`; if it has no token and `must_leave`, nothing changes."""
        logits.copy_(torch.where(without.isfinite().any(), without, logits) if must_leave else without)

    def _uncompleted(self, logits: torch.Tensor, slot: int) -> torch.Tensor:
        """`logits` without the last tokens of bad words whose other tokens end the output."""
        without, tail = logits.clone(), self.slots.tails[slot]
        for word in self.slots.words[slot]:
            head = len(word) - 1
            completes = (tail[len(tail) - head :] == word[:head]).all()
            last = word[head:]
            without.index_copy_(0, last, torch.where(completes, float("-inf"), without.index_select(0, last)))
        return without

    def _count(self, counts: DeviceCounts, token: torch.Tensor, nan: torch.Tensor) -> None:
        """`token` was generated, unless the row had none."""
        counts.generated.index_add_(0, token, (~nan).int())
        counts.seen.logical_or_(counts.generated > 0)


def bits_of(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool ``[rows, vocab]`` of int32 ``[rows, words]``; bit ``t % 32`` of word ``t // 32`` is token t's."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]


def device_sampler(
    *, slots: int, vocab_size: int, kernel: SampleKernel, to_device: Callable[[HostArray], torch.Tensor]
) -> DeviceSampler:
    """A sampler with empty slots."""
    return DeviceSampler(vocab_size=vocab_size, columns=slot_columns(slots), kernel=kernel, to_device=to_device)
