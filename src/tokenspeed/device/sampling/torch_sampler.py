"""The sampler for logits in host memory."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from tokenspeed.device.sampling.adjust import adjust_logits
from tokenspeed.device.sampling.base import SampledTokens
from tokenspeed.device.sampling.draw import draw, draw_top
from tokenspeed.device.sampling.philox import uniforms
from tokenspeed.device.sampling.slots import SlotColumns, slot_columns
from tokenspeed.plane.messages import BoolArray
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array


@attrs.frozen(kw_only=True, eq=False)
class TorchSampler:
    """`sampling.base.Sampler`. Build it with `torch_sampler`.

    A row is drawn from ``softmax(adjusted logits / temperature)`` cut by min-p, then top-k, then top-p,
    each taken of what the one before left. Two rows with the same logits, request and position get the
    same token whatever else is in their batches.

    Attributes:
        vocab_size: ids from here on are never drawn, though logits may be wider.
    """

    vocab_size: int
    columns: SlotColumns

    def seat(self, seat: Seat) -> None:
        self.columns.seat(seat, vocab_size=self.vocab_size)

    def release(self, slot: int) -> None:
        self.columns.release(slot)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array) -> SampledTokens:
        columns, logits = self.columns, logits[:, : self.vocab_size]
        tokens, nan = _likeliest(logits)
        banned = positions < columns.banned_before[slots]
        special = np.flatnonzero(~columns.greedy[slots] | columns.adjusts[slots] | banned)
        if len(special):
            work = logits[torch.from_numpy(special)]
            work[torch.from_numpy(nan[special])] = 0.0  # flagged already; the rest must see numbers
            chosen, stuck = self._choose(work, slots[special], positions[special])
            tokens[special] = chosen
            nan[special] |= stuck
        tokens[nan] = 0
        if columns.counts:
            for slot, token in zip(slots[~nan].tolist(), tokens[~nan].tolist(), strict=True):
                if slot in columns.counts:
                    columns.counts[slot].add(token)
        return SampledTokens(tokens=torch.from_numpy(tokens), nan=torch.from_numpy(nan))

    def _choose(self, work: torch.Tensor, slots: Int64Array, positions: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Tokens of rows that are not plainly greedy, and which rows have no token left; changes `work`."""
        columns = self.columns
        adjust_logits(work, columns, slots, positions)
        tokens, stuck = _likeliest(work)
        drawn = np.flatnonzero(~columns.greedy[slots] & ~stuck)
        if len(drawn):
            rows, slots = work[torch.from_numpy(drawn)], slots[drawn]
            probs = self._probabilities(rows, slots)
            numbers = torch.from_numpy(uniforms(columns.seed[slots], positions[drawn]))
            tokens[drawn] = self._draw(probs, numbers, slots).numpy()
        return tokens, stuck

    def _probabilities(self, logits: torch.Tensor, slots: Int64Array) -> torch.Tensor:
        temperature = torch.from_numpy(self.columns.temperature[slots]).to(torch.float32)[:, None]
        # Relative to the maximum, so that dividing by a small temperature cannot overflow upwards.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
        min_p = self.columns.min_p[slots]
        if (min_p > 0).any():
            floor = np.log(np.maximum(min_p, np.finfo(np.float64).tiny)).astype(np.float32)
            floor[min_p <= 0] = -np.inf
            scaled.masked_fill_(scaled < torch.from_numpy(floor)[:, None], -torch.inf)
        return scaled.softmax(dim=-1)

    def _draw(self, probs: torch.Tensor, numbers: torch.Tensor, slots: Int64Array) -> torch.Tensor:
        top_k, top_p = self.columns.top_k[slots], self.columns.top_p[slots]
        cut = (top_k > 0) | (top_p < 1.0)
        if cut.all():
            return draw_top(probs, numbers, torch.from_numpy(top_k), torch.from_numpy(top_p))
        tokens = torch.empty(len(probs), dtype=torch.int64)
        whole, some = torch.from_numpy(np.flatnonzero(~cut)), torch.from_numpy(np.flatnonzero(cut))
        tokens[whole] = draw(probs[whole], numbers[whole])
        if len(some):
            limits = torch.from_numpy(top_k[cut]), torch.from_numpy(top_p[cut])
            tokens[some] = draw_top(probs[some], numbers[some], *limits)
        return tokens


def torch_sampler(*, slots: int, vocab_size: int) -> TorchSampler:
    """A sampler with empty slots."""
    return TorchSampler(vocab_size=vocab_size, columns=slot_columns(slots))


def _likeliest(logits: torch.Tensor) -> tuple[Int64Array, BoolArray]:
    """Index of each row's first maximum, and whether that is no finite number (NaN counts as the maximum).

    numpy, because its argmax of float32 was measured ten times as fast as torch's.
    """
    values = logits.numpy()
    tokens = values.argmax(axis=1).astype(np.int64)
    return tokens, ~np.isfinite(values[np.arange(len(tokens)), tokens])
