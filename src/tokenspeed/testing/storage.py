"""A storage executor driven by hand: it does nothing until it is told what came of an operation."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.operations import WeightsSource
from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.results import StorageDone, StorageReport


@attrs.define(eq=False)
class ScriptedStorage:
    """Meets `plane.ports.StorageExecutor`.

    Attributes:
        log: everything that was submitted.
        open: operations without an end, by id.
        stored: keys that a QUERY or GET finds when `serve` answers it; a PUT adds to them.
        now_s, pressure, error: of the next reports.
        refusals: what the next deletions are answered with; then they succeed.
        published: sources of weights that came into force.
    """

    log: list[StorageOp] = attrs.field(factory=list[StorageOp])
    open: dict[int, StorageOp] = attrs.field(factory=dict[int, StorageOp])
    stored: set[bytes] = attrs.field(factory=set[bytes])
    now_s: float = 0.0
    pressure: float = 0.0
    error: str = ""
    completed: list[StorageDone] = attrs.field(factory=list[StorageDone])
    cancelled: list[int] = attrs.field(factory=list[int])
    refusals: list[str] = attrs.field(factory=list[str])
    published: list[WeightsSource] = attrs.field(factory=list[WeightsSource])

    def submit(self, ops: Sequence[StorageOp]) -> None:
        for op in ops:
            self.log.append(op)
            if op.verb is not StorageVerb.CANCEL:
                if op.op_id in self.open:
                    raise InvariantBroken("two storage operations with one id", op_id=op.op_id)
                if op.verb is not StorageVerb.QUERY and len(op.keys) != len(op.host_blocks):
                    raise InvariantBroken("not one host block a key", op_id=op.op_id)
                self.open[op.op_id] = op

    def report(self) -> StorageReport:
        report = StorageReport(
            now_s=self.now_s,
            pressure=self.pressure,
            completed=tuple(self.completed),
            cancelled=tuple(self.cancelled),
            error=self.error,
        )
        self.completed.clear()
        self.cancelled.clear()
        return report

    def clear(self) -> str:
        refusal = self.refusals.pop(0) if self.refusals else ""
        if not refusal:
            self.stored.clear()
        return refusal

    def publish_weights(self, source: WeightsSource) -> None:
        self.published.append(source)
        self.stored.clear()

    def close(self) -> None:
        return None

    def verbs(self) -> list[str]:
        return [op.verb.value for op in self.log]

    def only(self, verb: StorageVerb) -> StorageOp:
        """The one open operation of that kind."""
        (op,) = [op for op in self.open.values() if op.verb is verb]
        return op

    def finish(self, op_id: int, *outcomes: bool) -> None:
        """The operation ends; without `outcomes`, as `stored` has it."""
        op = self.open.pop(op_id)
        known = tuple(key in self.stored or op.verb is StorageVerb.PUT for key in op.keys)
        if op.verb is StorageVerb.PUT:
            self.stored.update(key for key, ok in zip(op.keys, outcomes or known, strict=True) if ok)
        self.completed.append(StorageDone(op_id=op_id, outcomes=outcomes or known))

    def cancel(self, op_id: int) -> None:
        """The operation ends because it was given up."""
        del self.open[op_id]
        self.cancelled.append(op_id)

    def serve(self) -> None:
        """All open operations end as `stored` has it, in the order of their ids."""
        for op_id in sorted(self.open):
            self.finish(op_id)
