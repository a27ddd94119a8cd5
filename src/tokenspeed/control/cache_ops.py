"""The count of open Device cache operations, and the acknowledgments the replica agrees on."""

from __future__ import annotations

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import ExecutionPlan
from tokenspeed.plane.ports import DataPlane, Mesh
from tokenspeed.plane.results import NO_ACKS, CacheAcks


@attrs.define(eq=False)
class OpenCount:
    """Writer: CacheOps. ``early`` are acknowledgments seen here that a peer has not seen yet."""

    open: int = 0
    early: set[tuple[str, int]] = attrs.field(factory=set[tuple[str, int]])


@attrs.frozen(kw_only=True, eq=False)
class CacheOps:
    """Polls the plane only while something is open (RA-14)."""

    mesh: Mesh
    count: OpenCount = attrs.field(factory=OpenCount)

    @property
    def open(self) -> int:
        return self.count.open

    def note(self, plan: ExecutionPlan) -> None:
        self.count.open += len(plan.device_ops())

    def poll(self, plane: DataPlane) -> CacheAcks:
        """Acknowledgments that every member has seen, in the order of their ids."""
        if not self.count.open:
            return NO_ACKS
        acks = plane.poll_cache_results()
        if self.mesh.size > 1:
            acks = self._intersect(acks)
        self.count.open -= len(acks)
        if self.count.open < 0:
            raise InvariantBroken("more cache acknowledgments than operations", open=self.count.open)
        return acks

    def _intersect(self, acks: CacheAcks) -> CacheAcks:
        mine = self.count.early
        for field in attrs.fields(CacheAcks):
            mine.update((field.name, op) for op in getattr(acks, field.name))
        agreed = frozenset(mine).intersection(*self.mesh.gather(frozenset(mine)))
        mine.difference_update(agreed)
        return CacheAcks(
            **{f.name: tuple(sorted(op for name, op in agreed if name == f.name)) for f in attrs.fields(CacheAcks)}
        )
