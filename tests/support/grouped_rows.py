"""Sequences that share a pool of a full and a window group: what scheduler and executor do, without them.

Blocks wholly behind the window are given back before each forward, and what their entries in the block
table say then is a block full of NaN: a step that reads there computes no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.device.kv.grouped import GroupedPool
from tokenspeed.device.native.bind import bind_native
from tokenspeed.device.native.library import NativeLibrary, native_library
from tokenspeed.device.native.weights import load_native
from tokenspeed.device.step import AllReady, ForwardStep, LayersReady, RaggedRows
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.settings.model import WeightsMode


@attrs.define(eq=False)
class GroupedSequence:
    """One sequence: its tokens so far, how many are computed, and its blocks of each group; 0: given back."""

    tokens: list[int]
    blocks: tuple[list[int], ...]
    computed: int = 0


@attrs.define(eq=False)
class GroupedRun:
    """Hands out blocks in a scattered order and makes `RaggedRows` of sequences.

    Attributes:
        poison: by group, the block that entries behind the window name.
    """

    step: ForwardStep
    groups: tuple[CacheGroupSpec, ...]
    free: tuple[list[int], ...]
    poison: tuple[int, ...]
    ready: LayersReady = attrs.field(factory=AllReady)

    def sequence(self, tokens: Sequence[int]) -> GroupedSequence:
        return GroupedSequence(tokens=list(tokens), blocks=tuple([] for _ in self.groups))

    def end(self, row: GroupedSequence) -> None:
        for number, blocks in enumerate(row.blocks):
            self.free[number].extend(block for block in blocks if block)
            blocks.clear()

    def rows(self, work: Sequence[tuple[GroupedSequence, int]], *, all_logits: bool = False) -> RaggedRows:
        """`work`: sequences and how many of their next tokens to compute."""
        ids: list[int] = []
        positions: list[int] = []
        contexts: list[int] = []
        offsets = [0]
        for row, count in work:
            last = row.computed + count
            for number in range(len(self.groups)):
                self._cover(row, number, last)
            ids += row.tokens[row.computed : last]
            positions += range(row.computed, last)
            offsets.append(len(ids))
            contexts.append(last)
        logits = list(range(len(ids))) if all_logits else [offset - 1 for offset in offsets[1:]]
        tables = tuple(self._table(work, contexts, number) for number in range(len(self.groups)))
        return RaggedRows(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            offsets=torch.tensor(offsets),
            contexts=torch.tensor(contexts),
            block_tables=tables[0],
            logit_tokens=torch.tensor(logits),
            more_tables=tables[1:],
        )

    def forward(self, work: Sequence[tuple[GroupedSequence, int]], *, all_logits: bool = False) -> torch.Tensor:
        """Logits of each sequence's last computed token, or of all computed tokens."""
        rows = self.rows(work, all_logits=all_logits)
        logits = self.step.run(rows, layers=range(self.step.num_layers), ready=self.ready)
        for row, count in work:
            row.computed += count
        return logits

    def _cover(self, row: GroupedSequence, number: int, last: int) -> None:
        group, blocks = self.groups[number], row.blocks[number]
        if group.window_tokens:
            behind = max(0, row.computed + 1 - group.window_tokens) // group.block_tokens
            for column in range(min(behind, len(blocks))):
                if blocks[column]:
                    self.free[number].append(blocks[column])
                    blocks[column] = 0
        while len(blocks) * group.block_tokens < last:
            blocks.append(self.free[number].pop(0))

    def _table(self, work: Sequence[tuple[GroupedSequence, int]], contexts: Sequence[int], number: int) -> torch.Tensor:
        each = self.groups[number].block_tokens
        table = torch.zeros((len(work), max(-(-context // each) for context in contexts)), dtype=torch.int32)
        for index, (row, _) in enumerate(work):
            used = row.blocks[number][: -(-contexts[index] // each)]
            table[index, : len(used)] = torch.tensor([block or self.poison[number] for block in used])
        return table


def run_over(step: ForwardStep, pool: GroupedPool, *, seed: int = 0) -> GroupedRun:
    """Share the pool's parents out among its groups, the last block of each being poison."""
    generator = torch.Generator().manual_seed(seed)
    groups = pool.layout.groups
    free, poison, each = [], [], (pool.num_parents - 1) // len(groups)
    for number, group in enumerate(groups):
        first = (1 + number * each) * group.blocks_per_parent
        count = each * group.blocks_per_parent - 1
        free.append((torch.randperm(count, generator=generator) + first).tolist())
        poison.append(first + count)
        pool.layer_bytes(number)[poison[-1]].fill_(0xFF)  # NaN as float32 and as float16
    return GroupedRun(step=step, groups=groups, free=tuple(free), poison=tuple(poison))


def native_grouped_run(
    checkpoint: Checkpoint,
    mode: WeightsMode = WeightsMode.EXACT,
    *,
    num_parents: int,
    page_tokens: int = 8,
    threads: int = 1,
    kv_dtype: torch.dtype = torch.float32,
    library: NativeLibrary | None = None,
    seed: int = 0,
) -> GroupedRun:
    library = library or native_library()
    model = bind_native(
        library,
        load_native(library, checkpoint, mode, NoProgress()),
        num_pages=num_parents,
        page_tokens=page_tokens,
        threads=threads,
        kv_dtype=kv_dtype,
    )
    assert isinstance(model.pool, GroupedPool)
    return run_over(model.step, model.pool, seed=seed)
