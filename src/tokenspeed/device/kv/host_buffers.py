"""The two buffers of host memory: host-tier blocks (L2), and retraction images.

The host tier has the device pool's geometry: a group's block b is at sub-position ``b % k`` of parent
``b // k``, with k of the group's blocks a parent; parent 0 is the null parent. An image has room for
`CacheGroupSpec.image_blocks` blocks of every group, one group after the other, and for the state of a
slot behind them. Memory is taken where it is first written.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from tokenspeed.device.executors.ports import HostBytes
from tokenspeed.errors import InvariantBroken

ALIGNMENT = 64


@attrs.frozen(kw_only=True)
class HostGroup:
    """Blocks of one cache group, as the host sees them.

    Attributes:
        layer_bytes: one layer of one block.
        image_blocks: blocks an image has room for.
    """

    blocks_per_parent: int
    layers: int
    layer_bytes: int
    image_blocks: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes


@attrs.frozen(kw_only=True)
class HostLayout:
    """Sizes of the host tier and the image pool.

    Attributes:
        parents: of the host tier, the null parent included; 0: there is none.
        images: 0: none.
        slot_bytes: of a slot's state.
    """

    groups: tuple[HostGroup, ...]
    parents: int
    images: int
    slot_bytes: int

    @property
    def parent_bytes(self) -> int:
        """Of the host tier; every group's number of blocks divides it."""
        step = math.lcm(*(group.blocks_per_parent for group in self.groups))
        least = max(group.blocks_per_parent * group.block_bytes for group in self.groups)
        return -(-least // step) * step

    @property
    def image_bytes(self) -> int:
        """Of one image; the slot's state begins at a multiple of `ALIGNMENT`."""
        return self.state_at + -(-self.slot_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def state_at(self) -> int:
        blocks = sum(group.image_blocks * group.block_bytes for group in self.groups)
        return -(-blocks // ALIGNMENT) * ALIGNMENT


@attrs.frozen(kw_only=True, eq=False)
class HostBuffers:
    """Build them with `host_buffers`. Read and written by jobs of the write and load streams.

    Attributes:
        l2, images: uint8, one dimension; they share no memory (CT-6).
        blocks: by group, views of `l2`: ``[blocks, layers, layer_bytes]``.
        tails: by group, views of `images`: ``[images, image_blocks, layers, layer_bytes]``.
        states: view of `images`: ``[images, slot_bytes]``.
    """

    layout: HostLayout
    l2: HostBytes
    images: HostBytes
    blocks: tuple[HostBytes, ...]
    tails: tuple[HostBytes, ...]
    states: HostBytes


def host_buffers(layout: HostLayout) -> HostBuffers:
    """Raises: InvariantBroken: a host tier without a usable parent."""
    if layout.parents == 1 or min(layout.parents, layout.images) < 0:
        raise InvariantBroken("a host tier without a usable parent", layout=layout)
    l2 = np.zeros(layout.parents * layout.parent_bytes, dtype=np.uint8)
    images = np.zeros(layout.images * layout.image_bytes, dtype=np.uint8)
    tails, at = [], 0
    for group in layout.groups:
        shape = (layout.images, group.image_blocks, group.layers, group.layer_bytes)
        strides = (layout.image_bytes, group.block_bytes, group.layer_bytes, 1)
        tails.append(_view(images, at, shape, strides))
        at += group.image_blocks * group.block_bytes
    return HostBuffers(
        layout=layout,
        l2=l2,
        images=images,
        blocks=tuple(_blocks(l2, layout, group) for group in layout.groups),
        tails=tuple(tails),
        states=_view(images, layout.state_at, (layout.images, layout.slot_bytes), (layout.image_bytes, 1)),
    )


def _blocks(l2: HostBytes, layout: HostLayout, group: HostGroup) -> HostBytes:
    shape = (layout.parents * group.blocks_per_parent, group.layers, group.layer_bytes)
    return _view(l2, 0, shape, (layout.parent_bytes // group.blocks_per_parent, group.layer_bytes, 1))


def _view(buffer: HostBytes, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> HostBytes:
    """The buffer's bytes from `at` on, in another shape; checked to lie inside."""
    if 0 in shape:
        return np.zeros(shape, dtype=np.uint8)
    end = at + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + 1
    if end > len(buffer):
        raise InvariantBroken("a view past the end of its buffer", end=end, size=len(buffer))
    view: HostBytes = np.lib.stride_tricks.as_strided(buffer[at:], shape=shape, strides=strides)
    return view


def copy_blocks(into: HostBytes, to: tuple[int, ...], source: HostBytes, of: tuple[int, ...]) -> None:
    """``into[to[i]] = source[of[i]]`` for every i, in order; neighbours are copied at once.

    Plain memory copies without the interpreter's lock: streams other than the exec stream may not
    compute in parallel.
    """
    begin, count = 0, len(to)
    while begin < count:
        end = begin + 1
        while end < count and to[end] == to[end - 1] + 1 and of[end] == of[end - 1] + 1:
            end += 1
        into[to[begin] : to[end - 1] + 1] = source[of[begin] : of[end - 1] + 1]
        begin = end
