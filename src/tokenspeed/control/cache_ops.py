"""The count of open Device cache operations, and the acknowledgments the replica agrees on."""

from __future__ import annotations

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import ExecutionPlan
from tokenspeed.plane.ports import DataPlane, Mesh
from tokenspeed.plane.results import NO_ACKS, CacheAcks


class Unaccounted(InvariantBroken):
    """More acknowledgments than operations: one was acknowledged twice, or never dispatched (CT-14)."""


@attrs.define(eq=False)
class OpenCount:
    """Writer: CacheOps. ``early`` are acknowledgments seen here that a peer has not seen yet."""

    open: int = 0
    early: set[tuple[str, int]] = attrs.field(factory=set[tuple[str, int]])


@attrs.frozen(kw_only=True, eq=False)
class CacheOps:
    """Polls the plane only while something is open (RA-14).

    The count relies on one acknowledgment an operation (CT-12). A repeated one lowers it although
    nothing ended: it may reach zero while an operation is open, whose end is not asked for any more.
    """

    mesh: Mesh
    count: OpenCount = attrs.field(factory=OpenCount)

    @property
    def open(self) -> int:
        return self.count.open

    def note(self, plan: ExecutionPlan) -> None:
        self.count.open += len(plan.device_ops())

    def poll(self, plane: DataPlane) -> CacheAcks:
        """Acknowledgments that every member has seen. Raises: Unaccounted."""
        if not self.count.open:
            return NO_ACKS
        acks = plane.poll_cache_results()
        if self.mesh.size > 1:
            acks = self._intersect(acks)
        return self.acknowledged(acks)

    def acknowledged(self, acks: CacheAcks) -> CacheAcks:
        """Count `acks` as ended, then leave out repeats (CT-13). Raises: Unaccounted."""
        if not acks:
            return acks
        self.count.open -= len(acks)
        if self.count.open < 0:
            raise Unaccounted("more cache acknowledgments than operations", open=self.count.open, acks=acks)
        return CacheAcks(
            write_backs=tuple(dict.fromkeys(acks.write_backs)),
            load_backs=tuple(dict.fromkeys(acks.load_backs)),
            snapshots=tuple(dict.fromkeys(acks.snapshots)),
            restores=tuple(dict.fromkeys(acks.restores)),
        )

    def _intersect(self, acks: CacheAcks) -> CacheAcks:
        mine = self.count.early
        for field in attrs.fields(CacheAcks):
            mine.update((field.name, op) for op in getattr(acks, field.name))
        agreed = frozenset(mine).intersection(*self.mesh.gather(frozenset(mine)))
        mine.difference_update(agreed)
        return CacheAcks(
            **{f.name: tuple(sorted(op for name, op in agreed if name == f.name)) for f in attrs.fields(CacheAcks)}
        )
