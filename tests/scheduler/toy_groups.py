"""A toy model with several cache groups, over parents of memory that the groups share.

The next token depends on every number of every group's state that a real model would read, so a block
granted twice, evicted too early, not copied, not zeroed or matched wrongly shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import FROM_DEVICE, BlockCopy, ExecutionPlan, ForwardBatch, GroupBlocks
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.scheduler.config import SchedulerConfig

VOCAB = 50
MASK = (1 << 63) - 1
GARBAGE = 0x5EED


def mix(before: int, token: int) -> int:
    return (before * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK


def is_stop(token: int) -> bool:
    return token % 17 == 0


def oracle(
    prompt: Sequence[int], max_new: int, *, eos_ends: bool, specs: tuple[CacheGroupSpec, ...] = (CacheGroupSpec(),)
) -> list[int]:
    """What the toy model generates for `prompt`, alone and without blocks."""
    columns: list[list[int]] = [[] for _ in specs]
    out: list[int] = []

    def read(token: int) -> None:
        for spec, column in zip(specs, columns, strict=True):
            if spec.kind == "window":
                column.append(mix(_xor(column[-(spec.window_tokens - 1) :] if spec.window_tokens > 1 else []), token))
            else:
                column.append(mix(column[-1] if column else 0, token))

    for token in prompt:
        read(token)
    while len(out) < max_new:
        total = 0
        for spec, column in zip(specs, columns, strict=True):
            total ^= {"full": _xor(column), "state": column[-1], "window": _xor(column[-spec.window_tokens :])}[
                spec.kind
            ]
        out.append(total % VOCAB)
        if eos_ends and is_stop(out[-1]):
            break
        read(out[-1])
    return out


def _xor(values: Sequence[int]) -> int:
    total = 0
    for value in values:
        total ^= value
    return total


@attrs.define(eq=False)
class Device:
    """Block tables by group and slot, numbers in parents, the last sampled token by slot."""

    config: SchedulerConfig
    memory: list[list[int]]
    tables: list[Int32Array]
    last: dict[int, tuple[int, int, int]] = attrs.field(factory=dict)  # slot -> row, position, token

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

    def _at(self, group: int, slot: int, position: int) -> tuple[int, int]:
        spec = self.specs[group]
        if spec.kind == "state":
            return self._where(group, int(self.tables[group][slot, 0]), 0)
        block = int(self.tables[group][slot, position // spec.block_tokens])
        return self._where(group, block, position % spec.block_tokens)

    def _get(self, group: int, slot: int, position: int) -> int:
        parent, at = self._at(group, slot, position)
        return self.memory[parent][at]

    def _read_token(self, slot: int, position: int, token: int) -> None:
        for number, spec in enumerate(self.specs):
            if spec.kind == "window":
                low = max(0, position - spec.window_tokens + 1)
                before = _xor([self._get(number, slot, p) for p in range(low, position)])
            elif spec.kind == "state":
                before = self._get(number, slot, 0)
            else:
                before = self._get(number, slot, position - 1) if position else 0
            parent, at = self._at(number, slot, position)
            self.memory[parent][at] = mix(before, token)

    def _sample(self, slot: int, end: int) -> int:
        total = 0
        for number, spec in enumerate(self.specs):
            low = max(0, end - spec.window_tokens) if spec.kind == "window" else 0
            positions = range(1) if spec.kind == "state" else range(low, end)
            total ^= _xor([self._get(number, slot, p) for p in positions])
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
            for position in range(start, start + count):
                token = int(batch.input_ids[at])
                at += 1
                if token == FROM_DEVICE:
                    owner, sampled_at, token = self.last[slot]
                    assert (owner, sampled_at) == (row, position), "the slot's latest token is another one"
                self._read_token(slot, position, token)
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
            np.zeros((config.max_num_seqs, -(-config.max_model_len // spec.block_tokens)), dtype=np.int32)
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
