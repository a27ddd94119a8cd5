"""Cache operations of the device: drafted while a plan is built, open until they are acknowledged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TypeAlias, TypeVar

import attrs

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import (
    CacheOp,
    GroupBlocks,
    HostPages,
    LoadBackOp,
    RestoreBatch,
    RestoreOp,
    SnapshotBatch,
    SnapshotOp,
    WriteBackOp,
)
from tokenspeed.plane.results import CacheAcks

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class Store:
    """Device blocks to host blocks; `ordered`: stream-ordered, else the device blocks are pinned."""

    group: int
    device_blocks: Int32Array
    host_blocks: Int32Array
    ordered: bool


@attrs.frozen(kw_only=True, eq=False)
class Load:
    """Host blocks to device blocks, both pinned."""

    group: int
    host_blocks: Int32Array
    device_blocks: Int32Array


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    slot: int
    tail: tuple[GroupBlocks, ...]
    image: int


@attrs.frozen(kw_only=True, eq=False)
class Restore:
    slot: int
    pages: tuple[HostPages, ...]
    tail: tuple[GroupBlocks, ...]
    image: int


Work: TypeAlias = Store | Load | Snapshot | Restore
W = TypeVar("W", Store, Load, Snapshot, Restore)


@attrs.define(eq=False)
class OperationState:
    """Writer: Operations. ``drafts``: of the plan under construction. Both are bounded by the blocks and images."""

    drafts: list[Work] = attrs.field(factory=list[Work])
    open: dict[int, Work] = attrs.field(factory=dict[int, Work])
    last_id: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Operations:
    """Numbers operations in the order in which they stand in the plan."""

    state: OperationState = attrs.field(factory=OperationState)

    @property
    def open(self) -> int:
        """Operations drafted or not acknowledged."""
        return len(self.state.drafts) + len(self.state.open)

    def add(self, work: Work) -> None:
        self.state.drafts.append(work)

    def take(self) -> tuple[CacheOp, ...]:
        """The plan's operations: what is stream-ordered, other stores, loads, restores."""
        drafts = self.state.drafts
        if not drafts:
            return ()
        ops: list[CacheOp] = [self._store(work) for work in _of(drafts, Store) if work.ordered]
        snapshots = tuple(self._snapshot(work) for work in _of(drafts, Snapshot))
        if snapshots:
            ops.append(SnapshotBatch(ops=snapshots))
        ops.extend(self._store(work) for work in _of(drafts, Store) if not work.ordered)
        ops.extend(self._load(work) for work in _of(drafts, Load))
        restores = tuple(self._restore(work) for work in _of(drafts, Restore))
        if restores:
            ops.append(RestoreBatch(ops=restores))
        drafts.clear()
        return tuple(ops)

    def done(self, acks: CacheAcks) -> list[Work]:
        """What these acknowledge; unknown and repeated ones are passed over (SP-16)."""
        works: list[Work] = []
        kinds: tuple[tuple[tuple[int, ...], type[Work]], ...] = (
            (acks.write_backs, Store),
            (acks.load_backs, Load),
            (acks.snapshots, Snapshot),
            (acks.restores, Restore),
        )
        for ids, kind in kinds:
            for op_id in ids:
                work = self.state.open.get(op_id)
                if not isinstance(work, kind):
                    log.debug("acknowledgment of %s %d, which is not open", kind.__name__, op_id)
                    continue
                del self.state.open[op_id]
                works.append(work)
        return works

    def works(self) -> tuple[Work, ...]:
        """Drafted and open ones; a copy, for diagnostics."""
        return (*self.state.open.values(), *self.state.drafts)

    def _number(self, work: Work) -> int:
        self.state.last_id += 1
        self.state.open[self.state.last_id] = work
        return self.state.last_id

    def _store(self, work: Store) -> WriteBackOp:
        return WriteBackOp(
            op_id=self._number(work),
            group=work.group,
            device_blocks=tuple(work.device_blocks.tolist()),
            host_blocks=tuple(work.host_blocks.tolist()),
            stream_ordered=work.ordered,
        )

    def _load(self, work: Load) -> LoadBackOp:
        return LoadBackOp(
            op_id=self._number(work),
            group=work.group,
            host_blocks=tuple(work.host_blocks.tolist()),
            device_blocks=tuple(work.device_blocks.tolist()),
        )

    def _snapshot(self, work: Snapshot) -> SnapshotOp:
        return SnapshotOp(op_id=self._number(work), slot=work.slot, tail=work.tail, image=work.image)

    def _restore(self, work: Restore) -> RestoreOp:
        return RestoreOp(op_id=self._number(work), slot=work.slot, pages=work.pages, tail=work.tail, image=work.image)


def _of(works: Iterable[Work], kind: type[W]) -> Iterator[W]:
    return (work for work in works if isinstance(work, kind))
