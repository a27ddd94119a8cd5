"""Sequences that share a KV pool, driven through a step by hand: what an executor does, without one."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from tokenspeed.device.step import AllReady, ForwardStep, LayersReady, RaggedRows


@attrs.define(eq=False)
class Sequenced:
    """One sequence: its tokens so far, how many are computed, and its pages in order."""

    tokens: list[int]
    pages: list[int]
    computed: int = 0


@attrs.define(eq=False)
class PagedRun:
    """Hands out pages in a scattered order and makes `RaggedRows` of sequences."""

    step: ForwardStep
    page_tokens: int
    free: list[int]
    ready: LayersReady = attrs.field(factory=AllReady)

    def sequence(self, tokens: Sequence[int]) -> Sequenced:
        return Sequenced(tokens=list(tokens), pages=[])

    def end(self, row: Sequenced) -> None:
        self.free.extend(row.pages)
        row.pages.clear()

    def rows(self, work: Sequence[tuple[Sequenced, int]], *, all_logits: bool = False) -> RaggedRows:
        """`work`: sequences and how many of their next tokens to compute."""
        ids, positions, offsets, contexts = [], [], [0], []
        for row, count in work:
            last = row.computed + count
            while len(row.pages) * self.page_tokens < last:
                row.pages.append(self.free.pop())
            ids += row.tokens[row.computed : last]
            positions += range(row.computed, last)
            offsets.append(len(ids))
            contexts.append(last)
        width = max(-(-context // self.page_tokens) for context in contexts)
        tables = torch.zeros((len(work), width), dtype=torch.int32)
        for index, (row, _) in enumerate(work):
            used = -(-contexts[index] // self.page_tokens)
            tables[index, :used] = torch.tensor(row.pages[:used], dtype=torch.int32)
        logits = list(range(len(ids))) if all_logits else [offset - 1 for offset in offsets[1:]]
        return RaggedRows(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            offsets=torch.tensor(offsets),
            contexts=torch.tensor(contexts),
            block_tables=tables,
            logit_tokens=torch.tensor(logits),
        )

    def forward(self, work: Sequence[tuple[Sequenced, int]], *, all_logits: bool = False) -> torch.Tensor:
        """Logits of each sequence's last computed token, or of all computed tokens."""
        rows = self.rows(work, all_logits=all_logits)
        logits = self.step.run(rows, layers=range(self.step.num_layers), ready=self.ready)
        for row, count in work:
            row.computed += count
        return logits


def paged_run(step: ForwardStep, *, num_pages: int, page_tokens: int, seed: int = 0) -> PagedRun:
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return PagedRun(step=step, page_tokens=page_tokens, free=order.tolist())
