"""The sampler for logits in host memory: plainly greedy rows as one batch, every other row by itself.

Written in numpy: on one row its maximum, partition and sort of float32 were measured several times as
fast as torch's, and a row that is worked on alone cannot depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np
import torch

from tokenspeed.device.host_sync import device_code
from tokenspeed.device.sampling.adjust import adjust
from tokenspeed.device.sampling.base import SampledTokens, TokenMasks
from tokenspeed.device.sampling.draw import Draw, Drawer, Float32Array, draw_each
from tokenspeed.device.sampling.philox import uniforms
from tokenspeed.device.sampling.processors import NO_PROCESSORS, LogitsProcessor, Processors
from tokenspeed.device.sampling.slots import SlotColumns, slot_columns
from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array

NO_TOKEN = -1
NOBODY_HELD: Mapping[int, Int32Array] = MappingProxyType({})


@attrs.frozen(kw_only=True, eq=False)
class BatchSampler:
    """`sampling.base.Sampler`. Build it with `batch_sampler`.

    Two rows with the same logits, request and position get the same token whatever else is in their batches.

    Attributes:
        vocab_size: ids from here on are never drawn, though logits may be wider.
        drawer: draws the tokens of rows that are not greedy.
    """

    vocab_size: int
    columns: SlotColumns
    processors: Processors
    drawer: Drawer = draw_each

    def seat(self, seat: Seat) -> None:
        self.columns.seat(seat, vocab_size=self.vocab_size)
        self.processors.seat(seat)
        if self.processors.uses(seat.slot):
            self.columns.adjusts[seat.slot] = True

    def release(self, slot: int) -> None:
        self.columns.release(slot)
        self.processors.release(slot)

    @device_code
    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        """`logits` is a CPU tensor."""
        columns = self.columns
        values: Float32Array = logits.numpy()[:, : self.vocab_size]
        tokens, nan = _likeliest(values)
        special = ~columns.greedy[slots] | columns.adjusts[slots] | (positions < columns.banned_before[slots])
        held = NOBODY_HELD if masks is None else dict(zip(masks.rows.tolist(), masks.words, strict=True))
        special[list(held)] = True
        rows = np.flatnonzero(special & ~nan)
        if len(rows):
            numbers = uniforms(columns.seed[slots[rows]], positions[rows])
            self._choose(values, tokens, rows, slots, positions, numbers.tolist(), held)
            nan |= tokens == NO_TOKEN
        tokens[nan] = 0
        if columns.counts or columns.tails or self.processors.seated.rows:
            for slot, token in zip(slots[~nan].tolist(), tokens[~nan].tolist(), strict=True):
                columns.drew(slot, token)
                self.processors.drew(slot, token)
        return SampledTokens(tokens=torch.from_numpy(tokens), nan=torch.from_numpy(nan))

    def _choose(
        self,
        values: Float32Array,
        tokens: Int64Array,
        rows: Int64Array,
        slots: Int64Array,
        positions: Int64Array,
        numbers: list[float],
        held: Mapping[int, Int32Array],
    ) -> None:
        """Write the tokens of these rows, or NO_TOKEN where the adjustments left none; `held`: masks by row."""
        columns, drawn, logits, draws = self.columns, list[int](), list[Float32Array](), list[Draw]()
        for row, number in zip(rows.tolist(), numbers, strict=True):
            slot, position, line = int(slots[row]), int(positions[row]), values[row]
            mask = held.get(row)
            if mask is not None or columns.adjusts[slot] or position < columns.banned_before[slot]:
                line = line.copy()
                usable = adjust(line, columns, slot, position, processors=self.processors, mask=mask)
                best = int(line.argmax())
                if not usable or not np.isfinite(line[best]):
                    tokens[row] = NO_TOKEN
                    continue
                if columns.greedy[slot]:
                    tokens[row] = best
                    continue
            drawn.append(row)
            logits.append(line)
            draws.append(self._draw(slot, number))
        if drawn:
            tokens[drawn] = self.drawer(logits, draws)

    def _draw(self, slot: int, number: float) -> Draw:
        columns = self.columns
        return Draw(
            number=number,
            temperature=float(columns.temperature[slot]),
            top_k=int(columns.top_k[slot]),
            top_p=float(columns.top_p[slot]),
            min_p=float(columns.min_p[slot]),
        )


def batch_sampler(
    *,
    slots: int,
    vocab_size: int,
    drawer: Drawer = draw_each,
    processors: Mapping[str, LogitsProcessor] = NO_PROCESSORS,
) -> BatchSampler:
    """A sampler with empty slots."""
    return BatchSampler(
        vocab_size=vocab_size,
        columns=slot_columns(slots),
        processors=Processors(registered=processors, vocab_size=vocab_size),
        drawer=drawer,
    )


def _likeliest(logits: Float32Array) -> tuple[Int64Array, BoolArray]:
    """Index of each row's first maximum, and whether that is no finite number (NaN counts as the maximum)."""
    tokens = logits.argmax(axis=1).astype(np.int64)
    return tokens, ~np.isfinite(logits[np.arange(len(tokens)), tokens])
