"""What the hash model keeps of its tokens: one pool of parents, shared by the cache groups of a model."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs

Int64Array: TypeAlias = npt.NDArray[np.int64]

NEVER_WRITTEN = -7
_BASE, _MODULUS, _START = 1_000_003, 2_147_483_629, 17


@attrs.define(eq=False)
class GroupMemory:
    """One group's blocks. A parent that another group wrote to since holds nothing of this one.

    A block of a full group holds token ids. One of a window group holds, for each token, a number made
    of the token and of those numbers of the tokens before it in the window: each depends on all tokens
    before, as a real model's keys and values do. A state block holds one such number.

    Attributes:
        content: int64 ``[blocks, tokens]``; ``[blocks, 1]`` of a state group.
        tables: int32 ``[slots, max_blocks]``.
        writers: int32 ``[parents]``, the group that wrote last; shared by all groups.
    """

    number: int
    spec: CacheGroupSpec
    content: Int64Array
    tables: Int32Array
    writers: Int32Array

    def take(self, slot: int, start: int, ids: list[int]) -> int:
        """Keep the tokens from position `start` on; the group's share of what comes after the last of them."""
        if self.spec.kind == "state":
            return self._advance(int(self.tables[slot, 0]), ids)
        if self.spec.kind == "window":
            return self._slide(slot, start, ids)
        self._write(slot, start, ids)
        return hash_value(self._read(slot, 0, start + len(ids)))

    def block(self, block: int) -> Int64Array:
        """A copy of a block's content."""
        if self.writers[block // self.spec.blocks_per_parent] == self.number:
            kept: Int64Array = self.content[block].copy()
            return kept
        return np.full(self.content.shape[1], NEVER_WRITTEN, dtype=np.int64)

    def fill(self, block: int, content: Int64Array) -> None:
        self.content[block] = content
        self.writers[block // self.spec.blocks_per_parent] = self.number

    def clean(self, block: int) -> None:
        clean = 0 if self.spec.kind == "state" else NEVER_WRITTEN
        self.fill(block, np.full(self.content.shape[1], clean, dtype=np.int64))

    def _advance(self, block: int, ids: list[int]) -> int:
        state = int(self.block(block)[0])
        for token in ids:
            state = _next_state(state, token)
        self.fill(block, np.array([state], dtype=np.int64))
        return state

    def _slide(self, slot: int, start: int, ids: list[int]) -> int:
        seen = self._read(slot, max(0, start + 1 - self.spec.window_tokens), start)
        known = len(seen)
        for token in ids:
            seen.append(_next_in_window(seen, token, self.spec.window_tokens))
        self._write(slot, start, seen[known:])
        return seen[-1]

    def _places(self, slot: int, first: int, last: int) -> tuple[Int32Array, Int64Array]:
        positions = np.arange(first, last)
        return self.tables[slot, positions // self.spec.block_tokens], positions % self.spec.block_tokens

    def _read(self, slot: int, first: int, last: int) -> list[int]:
        blocks, offsets = self._places(slot, first, last)
        mine = self.writers[blocks // self.spec.blocks_per_parent] == self.number
        values: list[int] = np.where(mine, self.content[blocks, offsets], NEVER_WRITTEN).tolist()
        return values

    def _write(self, slot: int, first: int, values: list[int]) -> None:
        blocks, offsets = self._places(slot, first, first + len(values))
        self.content[blocks, offsets] = values
        self.writers[blocks // self.spec.blocks_per_parent] = self.number


def group_memory(specs: DeviceSpecs) -> tuple[GroupMemory, ...]:
    """Memory of the groups in `specs`, in which nothing was written yet."""
    writers = np.full(specs.num_pages, NEVER_WRITTEN, dtype=np.int32)
    return tuple(_memory(number, group, specs, writers) for number, group in enumerate(specs.groups))


def _memory(number: int, group: CacheGroupSpec, specs: DeviceSpecs, writers: Int32Array) -> GroupMemory:
    state = group.kind == "state"
    columns = 1 if state else -(-specs.max_model_len // group.block_tokens) + 1
    shape = (specs.num_pages * group.blocks_per_parent, 1 if state else group.block_tokens)
    return GroupMemory(
        number=number,
        spec=group,
        content=np.full(shape, NEVER_WRITTEN, dtype=np.int64),
        tables=np.zeros((specs.request_slots, columns), dtype=np.int32),
        writers=writers,
    )


def hash_value(context: list[int]) -> int:
    """A polynomial hash, equal on every machine."""
    value = _START
    for token in context:
        value = (value * _BASE + token + 1) % _MODULUS
    return value


def value_of(group: CacheGroupSpec, context: list[int]) -> int:
    """The share of `group` in what comes after `context`, worked out from the tokens alone."""
    if group.kind == "state":
        state = 0
        for token in context:
            state = _next_state(state, token)
        return state
    if group.kind == "window":
        seen: list[int] = []
        for token in context:
            seen.append(_next_in_window(seen, token, group.window_tokens))
        return seen[-1]
    return hash_value(context)


def _next_state(state: int, token: int) -> int:
    """From 0, the content of a clean block."""
    return (state * _BASE + token + 1) % _MODULUS


def _next_in_window(before: list[int], token: int, window_tokens: int) -> int:
    seen = before[-(window_tokens - 1) :] if window_tokens > 1 else []
    return (sum(seen) * _BASE + token + 1) % _MODULUS
