"""One pool for the blocks of several cache groups."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import TypeAlias

import attrs
import torch

from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.device.kv.layout import CacheLayout
from tokenspeed.device.kv.pool import KvPool
from tokenspeed.device.native.memory import zeroed_tensor
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockCopy, GroupBlocks

FLOAT_BYTES = 4
SLACK_BYTES = 256
"""Behind the last block: its last vector may be read past its end, never used from there."""

Span: TypeAlias = tuple[int, int]
"""First byte and the byte behind the last."""


@attrs.frozen(kw_only=True, eq=False)
class GroupedPool:
    """`executors.ports.BlockPool` of several groups. Build it with `grouped_pool`; exec stream only.

    Attributes:
        bytes: uint8, parent after parent. Its memory is taken where it is first written.
        num_parents: the null parent included.
    """

    bytes: torch.Tensor
    layout: CacheLayout
    num_parents: int

    @property
    def nbytes(self) -> int:
        return self.num_parents * self.layout.parent_bytes

    def blocks(self, group: int) -> torch.Tensor:
        """A view: uint8 ``[blocks, bytes]``, padding included. Raises InvariantBroken: no such group."""
        if not 0 <= group < len(self.layout.groups):
            raise InvariantBroken("a cache group that the model does not have", group=group)
        return self.bytes[: self.nbytes].view(-1, self.layout.groups[group].bytes_per_block)

    def layer_bytes(self, group: int) -> torch.Tensor:
        blocks, layers = self.blocks(group), self.layout.groups[group].layers
        each = self.layout.layer_bytes[group]
        return blocks[:, : layers * each].view(len(blocks), layers, each)

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """Copy blocks as if every source were read before the first write (RA-33).

        Parents change hands, so that a block which one group's copy reads may lie in the bytes that
        another group's copy writes: what is written over is compared as bytes, over all groups.

        Raises: InvariantBroken: a block outside the pool or of the null parent, or two destinations in one place.
        """
        sources = [self._span(copy.group, copy.source) for copy in copies]
        destinations = [self._span(copy.group, copy.destination) for copy in copies]
        written = sorted(destinations)
        if any(second[0] < first[1] for first, second in itertools.pairwise(written)):
            raise InvariantBroken("two copies to one place", copies=copies)
        with torch.inference_mode():
            # A destination that is its own source is no reason to set it aside, but harmless to.
            read = [self._read(span, aside=_overlaps(span, written)) for span in sources]
            for (first, last), content in zip(destinations, read, strict=True):
                self.bytes[first:last].copy_(content)

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        """Zero whole blocks. Raises InvariantBroken: a block outside the pool, or of the null parent."""
        spans = [self._span(group.group, block) for group in blocks for block in group.blocks]
        with torch.inference_mode():
            for first, last in spans:
                self.bytes[first:last].zero_()

    def _read(self, span: Span, *, aside: bool) -> torch.Tensor:
        content = self.bytes[span[0] : span[1]]
        return content.clone() if aside else content

    def _span(self, group: int, block: int) -> Span:
        groups = self.layout.groups
        if not 0 <= group < len(groups):
            raise InvariantBroken("a cache group that the model does not have", group=group)
        count, each = groups[group].blocks_per_parent, groups[group].bytes_per_block
        if not count <= block < count * self.num_parents:
            raise InvariantBroken("a block outside the pool, or of the null parent", group=group, block=block)
        return block * each, (block + 1) * each


def _overlaps(span: Span, written: list[Span]) -> bool:
    """`written` is sorted and free of overlaps."""
    after = bisect_left(written, (span[1], 0))
    return after > 0 and written[after - 1][1] > span[0]


HOST = torch.device("cpu")


def grouped_pool(layout: CacheLayout, *, num_parents: int, device: torch.device = HOST) -> GroupedPool:
    """An empty pool of `num_parents` parents, the null parent among them.

    Raises: InvariantBroken: no usable parent.
    """
    if num_parents < 2:
        raise InvariantBroken("a KV pool without a usable parent", num_parents=num_parents)
    count = num_parents * layout.parent_bytes + SLACK_BYTES
    if device.type == "cpu":
        memory = zeroed_tensor(count, torch.uint8)
    else:
        with torch.inference_mode(mode=False):  # an ordinary tensor, which streams may write in any mode
            memory = torch.zeros(count, dtype=torch.uint8, device=device)
    return GroupedPool(bytes=memory, layout=layout, num_parents=num_parents)


def attention_pages(
    pool: GroupedPool, group: int, *, kv_heads: int, page_tokens: int, head_dim: int, kernels: Kernels
) -> KvPool:
    """The blocks of an attention group of `pool` as pages of float32 keys and values, laid out as `kv.pool` says.

    Blocks are copied and zeroed by `pool`, which knows the other groups; this is for the forward.
    """
    layers, run = pool.layout.groups[group].layers, page_tokens * head_dim * FLOAT_BYTES
    if pool.layout.layer_bytes[group] != 2 * kv_heads * run or pool.layout.groups[group].bytes_per_block % run:
        raise InvariantBroken("a cache group whose blocks are not such pages", group=group, run_bytes=run)
    numbers = pool.blocks(group)[:, : layers * 2 * kv_heads * run].view(torch.float32)
    return KvPool(pages=numbers.view(-1, layers, 2, kv_heads, page_tokens, head_dim), kernels=kernels)
