"""Sequences that share a pool of a full and a window group: what scheduler and executor do, without them.

Blocks wholly behind the window are given back before each forward, and what their entries in the block
table say then is a block full of NaN: a step that reads there computes no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from tokenspeed.device.step import AllReady, ForwardStep, LayersReady, RaggedRows
from tokenspeed.plane.specs import CacheGroupSpec


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


def grouped_run(
    step: ForwardStep,
    groups: tuple[CacheGroupSpec, ...],
    layer_bytes: Sequence[torch.Tensor],
    *,
    num_parents: int,
    seed: int = 0,
) -> GroupedRun:
    """Share the parents out among the groups, the last of each being poison.

    Args:
        layer_bytes: by group, the pool's bytes as `executors.ports.BlockBytes.layer_bytes` gives them.
    """
    generator = torch.Generator().manual_seed(seed)
    free, poison, each = [], [], (num_parents - 1) // len(groups)
    for number, group in enumerate(groups):
        first = (1 + number * each) * group.blocks_per_parent
        count = each * group.blocks_per_parent - 1
        free.append((torch.randperm(count, generator=generator) + first).tolist())
        poison.append(first + count)
        layer_bytes[number][poison[-1]].fill_(0xFF)  # NaN as float32 and as float16
    return GroupedRun(step=step, groups=groups, free=tuple(free), poison=tuple(poison))
