"""Host memory of the toy device. Every operation does the worst that its kind of ordering allows.

An ordinary store reads its sources when it is acknowledged, a stream-ordered one before anything else of
its plan; what is written to the host, and what a restore writes to the device, is there no earlier than
the acknowledgment, and garbage until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from toy_groups import GARBAGE, Device

from tokenspeed.plane.plan import (
    DeviceCacheOp,
    ExecutionPlan,
    LoadBackOp,
    RestoreOp,
    SnapshotOp,
    WriteBackOp,
)
from tokenspeed.plane.results import CacheAcks

Values = list[int]
KINDS: dict[type, str] = {
    WriteBackOp: "write_backs",
    LoadBackOp: "load_backs",
    SnapshotOp: "snapshots",
    RestoreOp: "restores",
}


@attrs.frozen(eq=False)
class Pending:
    op: DeviceCacheOp
    since: int
    finish: Callable[[], None]


@attrs.define(eq=False)
class ToyHost:
    """`delay`: rounds from a plan to the acknowledgments of its operations; `held`: kinds that are not acknowledged."""

    device: Device
    delay: int = 0
    held: set[type] = attrs.field(factory=set)
    blocks: dict[tuple[int, int], Values] = attrs.field(factory=dict)
    images: dict[int, list[tuple[int, Values]]] = attrs.field(factory=dict)
    pending: list[Pending] = attrs.field(factory=list)
    seen: list[DeviceCacheOp] = attrs.field(factory=list)
    round: int = 0

    def stores(self, plan: ExecutionPlan) -> None:
        """Position 1 of a plan."""
        self.round += 1
        for op in plan.device_ops():
            self.seen.append(op)
            if isinstance(op, WriteBackOp):
                self._write_back(op)
            elif isinstance(op, SnapshotOp):
                self._snapshot(op)

    def loads(self, plan: ExecutionPlan) -> None:
        """Position 4, behind copies and zeroing."""
        for op in plan.device_ops():
            if isinstance(op, LoadBackOp):
                self._load_back(op)
            elif isinstance(op, RestoreOp):
                self._restore(op)

    def due(self) -> CacheAcks:
        """Operations that end now."""
        old = [one.op for one in self.pending if self.round - one.since >= self.delay]
        return self.end(op.op_id for op in old if type(op) not in self.held)

    def end(self, op_ids: Iterable[int]) -> CacheAcks:
        ids: dict[str, list[int]] = {kind: [] for kind in KINDS.values()}
        chosen = set(op_ids)
        for one in [one for one in self.pending if one.op.op_id in chosen]:
            one.finish()
            self.pending.remove(one)
            ids[KINDS[type(one.op)]].append(one.op.op_id)
        return CacheAcks(**{kind: tuple(numbers) for kind, numbers in ids.items()})

    def of(self, kind: type) -> list[DeviceCacheOp]:
        """All operations of a kind so far."""
        return [op for op in self.seen if isinstance(op, kind)]

    def _later(self, op: DeviceCacheOp, finish: Callable[[], None]) -> None:
        assert all(one.op.op_id < op.op_id for one in self.pending), "operation ids do not rise"
        self.pending.append(Pending(op, self.round, finish))

    def _write_back(self, op: WriteBackOp) -> None:
        assert len(set(op.device_blocks)) == len(op.device_blocks) == len(set(op.host_blocks)) == len(op.host_blocks)
        early = [self.device.read(op.group, block) for block in op.device_blocks]
        for block in op.host_blocks:
            self.blocks[op.group, block] = [GARBAGE]

        def finish() -> None:
            values = early if op.stream_ordered else [self.device.read(op.group, block) for block in op.device_blocks]
            self.blocks.update({(op.group, block): value for block, value in zip(op.host_blocks, values, strict=True)})

        self._later(op, finish)

    def _snapshot(self, op: SnapshotOp) -> None:
        values = [(part.group, self.device.read(part.group, block)) for part in op.tail for block in part.blocks]
        for part in op.tail:
            assert len(part.blocks) <= self.device.specs[part.group].image_blocks
        self.images[op.image] = []
        self._later(op, lambda: self.images.update({op.image: values}))

    def _load_back(self, op: LoadBackOp) -> None:
        values = [list(self.blocks[op.group, block]) for block in op.host_blocks]
        for block, value in zip(op.device_blocks, values, strict=True):
            self.device.write(op.group, block, value)

        def finish() -> None:
            now = [self.blocks[op.group, block] for block in op.host_blocks]
            assert now == values, "written over while it was read"

        self._later(op, finish)

    def _restore(self, op: RestoreOp) -> None:
        tail = [(part.group, block) for part in op.tail for block in part.blocks]
        self._spoil((page.group, block) for page in op.pages for block in page.device_blocks)
        self._spoil(tail)

        def finish() -> None:
            for page in op.pages:
                for source, target in zip(page.host_blocks, page.device_blocks, strict=True):
                    self.device.write(page.group, target, self.blocks[page.group, source])
            for (group, block), (of, values) in zip(tail, self.images[op.image], strict=True):
                assert group == of
                self.device.write(group, block, values)

        self._later(op, finish)

    def _spoil(self, blocks: Iterable[tuple[int, int]]) -> None:
        for group, block in blocks:
            values = self.device.read(group, block)
            self.device.write(group, block, [GARBAGE] * len(values))


def written_blocks(plan: ExecutionPlan) -> list[tuple[int, int]]:
    """Device blocks that the plan's loads overwrite."""
    found: list[tuple[int, int]] = []
    for op in plan.device_ops():
        if isinstance(op, LoadBackOp):
            found += [(op.group, block) for block in op.device_blocks]
        elif isinstance(op, RestoreOp):
            found += [(page.group, block) for page in op.pages for block in page.device_blocks]
            found += [(part.group, block) for part in op.tail for block in part.blocks]
    return found
