"""The debug form of block reuse: what a block held for another request is not a number any more (DP-51).

With TOKENSPEED_CAPTURE_CHECK=1 every forward first overwrites the blocks that it begins, all bytes
set: NaN in every format of floats, -1 in every integer. A block that was freed and granted anew holds nothing of
its new request before that request's first forward in it, unless something was copied or loaded into
it, and then the forward begins behind that. So whatever is read of a block before it was written, or
behind its request's context, goes wrong at once and visibly, whoever owned the block before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import torch

from tokenspeed.device.capture import ENV_SWITCH
from tokenspeed.device.executors.ports import BlockBytes
from tokenspeed.device.host_sync import device_code
from tokenspeed.device.kv.layout import STATE
from tokenspeed.device.step import ForwardStep, LayersReady, RaggedRows
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import Int64Array

ALL_BITS = 0xFF


@attrs.frozen(kw_only=True, eq=False)
class FreshBlocksPoisoned:
    """`ForwardStep` that spoils the blocks each forward begins, then runs `inner`. Host memory only.

    State blocks are left alone: a state begins as zeros, and a forward reads it before it writes.

    Attributes:
        groups: of the pool behind `blocks`, by number.
    """

    inner: ForwardStep
    blocks: BlockBytes
    groups: tuple[CacheGroupSpec, ...]

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layers.start == 0:
            self._poison(rows)
        return self.inner.run(rows, layers=layers, ready=ready, hidden=hidden)

    @device_code
    def _poison(self, rows: RaggedRows) -> None:
        contexts = rows.contexts.numpy()
        starts = contexts - np.diff(rows.offsets.numpy())
        for number, (group, table) in enumerate(zip(self.groups, rows.group_tables, strict=True)):
            fresh = tuple(_fresh(group, table.numpy(), starts, contexts)) if group.kind != STATE else ()
            if fresh:
                self.blocks.layer_bytes(number).numpy()[np.concatenate(fresh)] = ALL_BITS


def _fresh(group: CacheGroupSpec, table: Int64Array, starts: Int64Array, contexts: Int64Array) -> Iterator[Int64Array]:
    """Of each row the blocks whose first token this forward computes; none of the null parent."""
    firsts, ends = -(-starts // group.block_tokens), -(-contexts // group.block_tokens)
    for row, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
        if first < end:
            blocks = table[row, first:end]
            yield blocks[blocks >= group.blocks_per_parent]


def fresh_blocks(
    step: ForwardStep, blocks: BlockBytes, groups: tuple[CacheGroupSpec, ...], environ: Mapping[str, str]
) -> ForwardStep:
    """`step`, or around it `FreshBlocksPoisoned` where the environment has TOKENSPEED_CAPTURE_CHECK=1."""
    if environ.get(ENV_SWITCH) != "1":
        return step
    return FreshBlocksPoisoned(inner=step, blocks=blocks, groups=groups)
