"""A toy model with several cache groups, over parents of memory that the groups share.

The next token depends on every number of every group's state that a real model would read, so a block
granted twice, evicted too early, not copied, not zeroed or matched wrongly shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from hashlib import blake2b
from operator import xor

import attrs
import numpy as np

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import FROM_DEVICE, BlockCopy, ExecutionPlan, ForwardBatch, GroupBlocks
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import MediaItem
from tokenspeed.scheduler.config import SchedulerConfig

VOCAB = 50
MASK = (1 << 63) - 1
GARBAGE = 0x5EED


Taste = Callable[[int], int]
"""By position: what else than its id makes the token there another one; 0: nothing."""


def plain(position: int) -> int:
    """Text without a salt."""
    del position
    return 0


def taste_of(salt: bytes, media: tuple[MediaItem, ...]) -> Taste:
    """A salt changes every token, an image its placeholders: what is found under another name shows in the tokens."""
    if not salt and not media:
        return plain
    base = _number(salt)
    by_position = {
        item.first + at: base + _number(item.digest + bytes([at])) for item in media for at in range(item.tokens)
    }
    return lambda position: by_position.get(position, base)


def _number(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=6).digest(), "little") if name else 0


def mix(before: int, token: int) -> int:
    return (before * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK


def is_stop(token: int) -> bool:
    return token % 17 == 0


def columns(
    tokens: Sequence[int], specs: tuple[CacheGroupSpec, ...] = (CacheGroupSpec(),), taste: Taste = plain
) -> list[list[int]]:
    """By group and position, the numbers that the toy model leaves for `tokens`; of a state, those behind each."""
    filled: list[list[int]] = [[] for _ in specs]
    for spec, column in zip(specs, filled, strict=True):
        _fill(spec, column, tokens, 0, taste)
    return filled


def oracle(
    prompt: Sequence[int],
    max_new: int,
    *,
    eos_ends: bool,
    specs: tuple[CacheGroupSpec, ...] = (CacheGroupSpec(),),
    taste: Taste = plain,
) -> list[int]:
    """What the toy model generates for `prompt`, alone and without blocks."""
    filled, out = columns(prompt, specs, taste), list[int]()
    while True:
        total = 0
        for spec, column in zip(specs, filled, strict=True):
            total ^= {"full": _xor(column), "state": column[-1], "window": _xor(column[-spec.window_tokens :])}[
                spec.kind
            ]
        out.append(total % VOCAB)
        if len(out) == max_new or (eos_ends and is_stop(out[-1])):
            return out
        for spec, column in zip(specs, filled, strict=True):
            _fill(spec, column, out[-1:], len(column), taste)


def _fill(spec: CacheGroupSpec, column: list[int], tokens: Sequence[int], first: int, taste: Taste) -> None:
    """Append to `column`, the last of which lies before position `first`, what `tokens` leave."""
    seen = spec.window_tokens - 1 if spec.kind == "window" else 1
    for position, token in enumerate(tokens, first):
        before = _xor(column[max(0, len(column) - seen) :])
        column.append(mix(before, token + taste(position)))


def _xor(values: Sequence[int]) -> int:
    return reduce(xor, values, 0)


@attrs.define(eq=False)
class Device:
    """Block tables by group and slot, numbers in parents, the last sampled token by slot.

    `tastes`: of a row.
    """

    config: SchedulerConfig
    memory: list[list[int]]
    tables: list[Int32Array]
    last: dict[int, tuple[int, int, int]] = attrs.field(factory=dict)  # slot -> row, position, token
    tastes: Callable[[int], Taste] = attrs.field(default=lambda row: plain)

    @property
    def specs(self) -> tuple[CacheGroupSpec, ...]:
        return self.config.specs

    def forward(self, plan: ExecutionPlan) -> list[int]:
        return [] if plan.batch is None else self._forward(plan.batch)

    def prepare(self, plan: ExecutionPlan) -> None:
        """All of a plan but its batch, in the order of execution."""
        self.copy(plan.pages_to_copy)
        self.zero(plan.pages_to_zero)
        for grant in plan.grants:
            self.tables[grant.group][grant.slots, grant.indices] = grant.blocks

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        contents = [self.read(copy.group, copy.source) for copy in copies]
        for copy, values in zip(copies, contents, strict=True):
            self.write(copy.group, copy.destination, values)

    def zero(self, groups: tuple[GroupBlocks, ...]) -> None:
        for part in groups:
            for block in part.blocks:
                self.write(part.group, block, [0] * self._size(part.group))

    def read(self, group: int, block: int) -> list[int]:
        parent, at = self._where(group, block, 0)
        return self.memory[parent][at : at + self._size(group)]

    def write(self, group: int, block: int, values: Sequence[int]) -> None:
        parent, at = self._where(group, block, 0)
        self.memory[parent][at : at + self._size(group)] = values

    def _size(self, group: int) -> int:
        spec = self.specs[group]
        return 1 if spec.kind == "state" else spec.block_tokens

    def _where(self, group: int, block: int, offset: int) -> tuple[int, int]:
        k = self.specs[group].blocks_per_parent
        width = len(self.memory[0]) // k
        assert block >= k, "a block of the null parent"
        return block // k, block % k * width + offset

    def put(self, group: int, slot: int, position: int, value: int) -> None:
        """Write what the token at `position` leaves, over the state of a state group."""
        spec = self.specs[group]
        at = 0 if spec.kind == "state" else position
        block = int(self.tables[group][slot, at // spec.block_tokens])
        parent, offset = self._where(group, block, at % spec.block_tokens)
        self.memory[parent][offset] = value

    def values(self, group: int, slot: int, low: int, high: int) -> list[int]:
        """What positions ``low .. high - 1`` have left in a group by position."""
        size = self.specs[group].block_tokens
        first = low // size
        line = self.tables[group][slot, first : -(-high // size)].tolist()
        found = [value for block in line for value in self.read(group, block)]
        return found[low - first * size : high - first * size]

    def _read_chunk(self, row: int, slot: int, start: int, tokens: list[int]) -> None:
        taste = self.tastes(row)
        for number, spec in enumerate(self.specs):
            if spec.kind == "state":
                column = self.read(number, int(self.tables[number][slot, 0]))
            elif spec.kind == "window":
                column = self.values(number, slot, max(0, start - spec.window_tokens + 1), start)
            else:
                column = self.values(number, slot, max(0, start - 1), start)
            known = len(column)
            _fill(spec, column, tokens, start, taste)
            for position, value in enumerate(column[known:], start):
                self.put(number, slot, position, value)

    def _sample(self, slot: int, end: int) -> int:
        total = 0
        for number, spec in enumerate(self.specs):
            if spec.kind == "state":
                values = self.read(number, int(self.tables[number][slot, 0]))
            else:
                low = max(0, end - spec.window_tokens) if spec.kind == "window" else 0
                values = self.values(number, slot, low, end)
            total ^= _xor(values)
        return total % VOCAB

    def _forward(self, batch: ForwardBatch) -> list[int]:
        tokens, at = [], 0
        for row, slot, start, count, samples in zip(
            batch.rows.tolist(),
            batch.slots.tolist(),
            batch.starts.tolist(),
            batch.counts.tolist(),
            batch.samples.tolist(),
            strict=True,
        ):
            ids = batch.input_ids[at : at + count].tolist()
            at += count
            if ids == [FROM_DEVICE]:
                owner, sampled_at, token = self.last[slot]
                assert (owner, sampled_at) == (row, start), "the slot's latest token is another one"
                ids = [token]
            self._read_chunk(row, slot, start, ids)
            if samples:
                tokens.append(self._sample(slot, start + count))
                self.last[slot] = (row, start + count, tokens[-1])
        assert at == len(batch.input_ids)
        return tokens


def toy_device(config: SchedulerConfig) -> Device:
    units = 1
    for spec in config.specs:
        size = spec.blocks_per_parent * (1 if spec.kind == "state" else spec.block_tokens)
        units = int(np.lcm(max(units, size), spec.blocks_per_parent))
    while any(units % spec.blocks_per_parent for spec in config.specs):
        units += 1
    return Device(
        config,
        [[GARBAGE] * units for _ in range(config.num_pages)],
        [
            np.zeros((config.request_slots, -(-config.max_model_len // spec.block_tokens)), dtype=np.int32)
            for spec in config.specs
        ],
    )


def some_groups(page_tokens: int) -> dict[str, tuple[CacheGroupSpec, ...]]:
    """Combinations of groups that models have, and some that none has yet."""

    def full(k: int = 1, *, pages: int = 1) -> CacheGroupSpec:
        return CacheGroupSpec(name="full", block_tokens=pages * page_tokens, blocks_per_parent=k)

    def window(tokens: int, k: int = 1, *, pages: int = 1) -> CacheGroupSpec:
        return CacheGroupSpec(
            name="window", kind="window", window_tokens=tokens, block_tokens=pages * page_tokens, blocks_per_parent=k
        )

    def state(k: int = 1, *, pages: int = 2) -> CacheGroupSpec:
        return CacheGroupSpec(
            name="state", kind="state", block_tokens=pages * page_tokens, blocks_per_parent=k, zero_new_blocks=True
        )

    return {
        "full": (full(),),
        "full and window": (full(3), window(6)),
        "window": (window(5),),
        "full and state": (full(), state(2)),
        "state": (state(1),),
        "all": (full(2), window(7, 2), state(1)),
        "wide blocks": (full(4), full(1, pages=4)),
        "two windows": (window(3, 2), window(9, 1, pages=2)),
    }
