"""One token a row by thresholds: top-k, min-p and top-p without a sort, and a draw from what is left.

A cut keeps what is not below a threshold. The threshold is found bit by bit from the highest on, as a
radix selection with one-bit digits (Knuth, The Art of Computer Programming, volume 3, section 5.2.2 for
radix exchange; Alabi et al. 2012 for selection on parallel machines): floats of one sign are ordered as
their bits are. The random number is Philox4x32-10 (Salmon et al. 2011) of the row's seed and position, the
same as `sampling.philox` gives. A program works on one row, in fixed order: a draw depends on its row alone.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN202 -- the parameters of a Triton kernel have no Python types

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed.device.kernels.sample_rules import SampleRules

BLOCK = 4096


def sample(logits: torch.Tensor, rules: SampleRules) -> tuple[torch.Tensor, torch.Tensor]:
    """See `SampleKernel`."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    nan = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        _sample[(rows,)](
            logits,
            rules.temperature,
            rules.top_k,
            rules.top_p,
            rules.min_p,
            rules.seeds,
            rules.positions,
            tokens,
            nan,
            logits.stride(0),
            vocab,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        )
    return tokens, nan


@triton.jit
def _key(values):
    """int64 in [0, 2 ** 32), in the order of `values`; both zeros have the same."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + 0x80000000


@triton.jit
def _count(row, vocab, threshold, BLOCK: tl.constexpr):
    """How many logits have a key of at least `threshold`."""
    count = tl.zeros([], dtype=tl.int32)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < vocab
        kept = (_key(tl.load(row + column, mask=inside, other=0.0)) >= threshold) & inside
        count += tl.sum(kept.to(tl.int32), axis=0)
    return count


@triton.jit
def _weights(row, column, vocab, most, temperature, threshold, smallest):
    """Unnormalised probabilities of the tokens `column`, those cut by top-k and min-p 0."""
    inside = column < vocab
    values = tl.load(row + column, mask=inside, other=float("-inf"))
    weights = tl.exp((values - most) / temperature)
    return tl.where(inside & (_key(values) >= threshold) & (weights >= smallest), weights, 0.0)


@triton.jit
def _mass(row, vocab, most, temperature, threshold, smallest, least, BLOCK: tl.constexpr):
    """Sum of the weights whose bits are at least `least`."""
    mass = tl.zeros([], dtype=tl.float64)
    for at in range(0, vocab, BLOCK):
        weights = _weights(row, at + tl.arange(0, BLOCK), vocab, most, temperature, threshold, smallest)
        kept = weights.to(tl.int32, bitcast=True) >= least
        mass += tl.sum(tl.where(kept, weights.to(tl.float64), 0.0), axis=0)
    return mass


@triton.jit
def _likeliest(row, vocab, BLOCK: tl.constexpr):
    """The largest logit, its first place, and whether there is one that is not a number."""
    most = tl.full([], float("-inf"), dtype=tl.float32)
    token, wrong = tl.zeros([], dtype=tl.int32), tl.zeros([], dtype=tl.int32)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        values = tl.load(row + column, mask=column < vocab, other=float("-inf"))
        wrong = tl.maximum(wrong, tl.max((values != values).to(tl.int32), axis=0))  # noqa: PLR0124 -- NaN
        values = tl.where(values != values, float("-inf"), values)  # noqa: PLR0124 -- NaN
        largest = tl.max(values, axis=0)
        first = tl.min(tl.where(values == largest, column, vocab), axis=0)
        token = tl.where(largest > most, first, token)
        most = tl.maximum(most, largest)
    return most, token, wrong


@triton.jit
def _uniform(seed, position):
    """float64 in [0, 1) of 53 random bits."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    none = tl.zeros_like(low)
    first, second, _, _ = tl.philox(seed, low, high, none, none)
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) / 9007199254740992.0


# The rules are rows of one array: where each begins depends on how many there are.
@triton.jit(
    do_not_specialize=["row_stride"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"],
)
def _sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    tokens,
    nan,
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    """One program a row.

    logits: float32 [rows, vocab], last stride 1. The rules as in `SampleRules`. tokens: int64 [rows].
    nan: bool [rows]. grid: (rows,).
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    most, token, wrong = _likeliest(row, vocab, BLOCK)
    broken = (wrong > 0) | (most == float("-inf")) | (most == float("inf"))
    temperature = tl.load(temperatures + index)
    if (temperature > 0.0) & (broken == 0):
        smallest = tl.load(min_ps + index)
        kept = tl.load(top_ks + index)
        one = tl.full([], 1, dtype=tl.int64)
        threshold = tl.zeros([], dtype=tl.int64)
        if (kept > 0) & (kept < vocab):
            for bit in range(32):
                higher = threshold | (one << (31 - bit))
                threshold = tl.where(_count(row, vocab, higher, BLOCK) >= kept, higher, threshold)
        share = tl.load(top_ps + index)
        least = tl.zeros([], dtype=tl.int32)
        if share < 1.0:
            needed = share * _mass(row, vocab, most, temperature, threshold, smallest, least, BLOCK)
            for bit in range(30):  # no weight is above 1, whose highest bit is number 29
                more = least | (tl.full([], 1, dtype=tl.int32) << (29 - bit))
                mass = _mass(row, vocab, most, temperature, threshold, smallest, more, BLOCK)
                least = tl.where(mass >= needed, more, least)
        whole = _mass(row, vocab, most, temperature, threshold, smallest, least, BLOCK)
        wanted = _uniform(tl.load(seeds + index), tl.load(positions + index)) * whole
        before = tl.zeros([], dtype=tl.float64)
        found, last = tl.full([], -1, dtype=tl.int32), tl.zeros([], dtype=tl.int32)
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            weights = _weights(row, column, vocab, most, temperature, threshold, smallest)
            weights = tl.where(weights.to(tl.int32, bitcast=True) >= least, weights, 0.0)
            sums = before + tl.cumsum(weights.to(tl.float64), axis=0)
            there = weights > 0.0
            first = tl.min(tl.where(there & (sums > wanted), column, vocab), axis=0)
            found = tl.where((found < 0) & (first < vocab), first, found)
            last = tl.maximum(last, tl.max(tl.where(there, column, 0), axis=0))
            before = tl.max(sums, axis=0)
        # The product may round up to the whole sum, which no running sum exceeds.
        token = tl.where(found < 0, last, found)
    tl.store(tokens + index, tl.where(broken, 0, token).to(tl.int64))
    tl.store(nan + index, broken)
