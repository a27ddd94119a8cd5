"""What a cache operation must be like to be copied; all of it follows from the plan that has it."""

from __future__ import annotations

import attrs

from tokenspeed.device.kv.host_buffers import HostLayout
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import DeviceCacheOp, GroupBlocks, LoadBackOp, RestoreOp, SnapshotOp, WriteBackOp


@attrs.define(eq=False)
class ImageState:
    """Writer: `OpChecks`, on ``ts-forward``. By image, (group, number of tail blocks) of what it holds."""

    tails: dict[int, tuple[tuple[int, int], ...]] = attrs.field(factory=dict[int, tuple[tuple[int, int], ...]])


@attrs.frozen(kw_only=True, eq=False)
class OpChecks:
    """Raises InvariantBroken where an operation cannot be right. ``ts-forward`` only.

    Attributes:
        device_parents: of the device pool, the null parent included.
        slots: request slots of the device.
    """

    layout: HostLayout
    device_parents: int
    slots: int
    images: ImageState = attrs.field(factory=ImageState)

    def check(self, op: DeviceCacheOp) -> None:
        match op:
            case WriteBackOp() | LoadBackOp():
                self._pages(op, op.group, op.host_blocks, op.device_blocks)
            case SnapshotOp():
                self._image(op, op.image, op.slot, op.tail)
                self.images.tails[op.image] = _sizes(op.tail)
            case RestoreOp():
                self._image(op, op.image, op.slot, op.tail)
                for pages in op.pages:
                    self._pages(op, pages.group, pages.host_blocks, pages.device_blocks)
                if self.images.tails.get(op.image) != _sizes(op.tail):
                    raise InvariantBroken("an image that does not hold this tail", op=op, images=self.images.tails)

    def _pages(
        self, op: DeviceCacheOp, group: int, host_blocks: tuple[int, ...], device_blocks: tuple[int, ...]
    ) -> None:
        if len(host_blocks) != len(device_blocks):
            raise InvariantBroken("a copy of blocks that are not one to one", op=op)
        self._blocks(op, group, host_blocks, self.layout.parents)
        self._blocks(op, group, device_blocks, self.device_parents)

    def _image(self, op: DeviceCacheOp, image: int, slot: int, tail: tuple[GroupBlocks, ...]) -> None:
        if not 0 <= image < self.layout.images or not 0 <= slot < self.slots:
            raise InvariantBroken("no such image or slot", op=op, images=self.layout.images, slots=self.slots)
        if len({blocks.group for blocks in tail}) != len(tail):
            raise InvariantBroken("a group twice in one tail", op=op)
        for blocks in tail:
            self._blocks(op, blocks.group, blocks.blocks, self.device_parents)
            if len(blocks.blocks) > self.layout.groups[blocks.group].image_blocks:
                raise InvariantBroken("more blocks than an image has room for", op=op, group=blocks.group)

    def _blocks(self, op: DeviceCacheOp, group: int, blocks: tuple[int, ...], parents: int) -> None:
        if not 0 <= group < len(self.layout.groups):
            raise InvariantBroken("a cache group that the model does not have", op=op, group=group)
        each = self.layout.groups[group].blocks_per_parent
        if blocks and not each <= min(blocks) <= max(blocks) < parents * each:
            raise InvariantBroken("a block outside its pool, or of the null parent", op=op, parents=parents)


def _sizes(tail: tuple[GroupBlocks, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((blocks.group, len(blocks.blocks)) for blocks in tail))
