"""Storage (L3): the replica's agreement on executors' reports, and the submission of storage work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import attrs

from tokenspeed.errors import DeviceLost, InvariantBroken
from tokenspeed.plane.operations import CloseGroupOp, DrainedOp, OpenGroupOp, ResumeMemoryOp, UpdateWeightsOp
from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.ports import Mesh, StorageExecutor
from tokenspeed.plane.results import StorageDone, StorageReport, StorageTick

Operation: TypeAlias = DrainedOp | ResumeMemoryOp | OpenGroupOp | CloseGroupOp


class L3(Protocol):
    def agree(self, *, forward: bool) -> StorageTick | None:
        """This round's storage facts; `forward` is whether model forwards are permitted."""
        ...

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """Hand storage work to the executor; never waits."""
        ...

    @property
    def open(self) -> int:
        """Operations that somebody has not reported yet."""
        ...

    def clear(self) -> str:
        """Delete what is stored. Returns "", or why nothing has to change anywhere (CP-38)."""
        ...

    def operated(self, op: Operation, refusal: str) -> None:
        """An operation of the control queue was carried out on all members, or refused with a reason."""
        ...


@attrs.define(eq=False)
class Permission:
    """Writer: NoStorage. The permission the scheduler was last told."""

    forward: bool = True


@attrs.frozen(kw_only=True, eq=False)
class NoStorage:
    """No storage configured: a tick only when forward permission is withdrawn or returns (RA-13)."""

    told: Permission = attrs.field(factory=Permission)
    open: int = 0

    def agree(self, *, forward: bool) -> StorageTick | None:
        if forward == self.told.forward:
            return None
        self.told.forward = forward
        return StorageTick(forward=forward, storage=False)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        if ops:
            raise InvariantBroken("storage work planned without a storage executor", ops=len(ops))

    def clear(self) -> str:
        return ""

    def operated(self, op: Operation, refusal: str) -> None:
        return None


@attrs.define(eq=False)
class Owed:
    """An operation that some owner has not reported yet.

    Attributes:
        missing: owners without a report.
        outcomes: by key, true while no owner reported a failure.
    """

    missing: set[int]
    outcomes: list[bool]
    cancelled: bool = False


@attrs.define(eq=False)
class OpenOps:
    """Writer: AgreedStorage. By operation id; equal on all members after each agreement."""

    owed: dict[int, Owed] = attrs.field(factory=dict[int, Owed])


@attrs.frozen(kw_only=True, eq=False)
class AgreedStorage:
    """One exchange a round; what an operation came to is known once each of its owners has said so."""

    mesh: Mesh
    workers: StorageExecutor
    ops: OpenOps = attrs.field(factory=OpenOps)

    def agree(self, *, forward: bool) -> StorageTick:
        """Raises: DeviceLost: a member's report is invalid; on all members alike, behind the exchange (CT-32)."""
        reports = self.mesh.gather(self._report())
        errors = [f"member {rank}: {report.error}" for rank, report in enumerate(reports) if report.error]
        if errors:
            raise DeviceLost("the storage executor failed: " + "; ".join(errors))
        ended = sorted(self._merge(reports))
        ops = [(op_id, self.ops.owed.pop(op_id)) for op_id in ended]
        return StorageTick(
            forward=forward,
            # Both follow from the control state, which is equal on all members.
            storage=forward,
            now_s=reports[0].now_s,
            pressure=max(report.pressure for report in reports),
            completed=tuple(
                StorageDone(op_id=op_id, outcomes=tuple(op.outcomes)) for op_id, op in ops if not op.cancelled
            ),
            cancelled=tuple(op_id for op_id, op in ops if op.cancelled),
        )

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """Control thread; the executor's workers see host memory only (RA-23)."""
        if not ops:
            return
        for op in ops:
            if op.verb is not StorageVerb.CANCEL:
                self.ops.owed[op.op_id] = Owed(set(range(self.mesh.size)), [True] * len(op.keys))
        self.workers.submit(ops)

    @property
    def open(self) -> int:
        return len(self.ops.owed)

    def clear(self) -> str:
        """The first member's refusal, if any has one; no member changes its nearer tiers then."""
        return next((text for text in self.mesh.gather(self.workers.clear()) if text), "")

    def operated(self, op: Operation, refusal: str) -> None:
        """Weights are published behind the agreement on their load (CP-33). A release leaves storage as it is."""
        if isinstance(op, UpdateWeightsOp) and not refusal:
            self.workers.publish_weights(op.source)

    def _report(self) -> StorageReport:
        """An executor that cannot be polled is an invalid report: no peer is left waiting in the exchange."""
        try:
            return self.workers.report()
        except Exception as error:  # whatever it is, all members must see it
            return StorageReport(error=f"{type(error).__name__}: {error}")

    def _merge(self, reports: Iterable[StorageReport]) -> list[int]:
        """Note what each member reported; returns the operations that nobody owes any more."""
        ended = []
        for rank, report in enumerate(reports):
            for done in report.completed:
                op = self._owed(done.op_id, rank)
                if len(done.outcomes) != len(op.outcomes):
                    raise InvariantBroken("a storage operation with other outcomes than keys", op_id=done.op_id)
                op.outcomes = [a and b for a, b in zip(op.outcomes, done.outcomes, strict=True)]
                if not op.missing:
                    ended.append(done.op_id)
            for op_id in report.cancelled:
                op = self._owed(op_id, rank)
                op.cancelled = True
                if not op.missing:
                    ended.append(op_id)
        return ended

    def _owed(self, op_id: int, rank: int) -> Owed:
        op = self.ops.owed.get(op_id)
        if op is None or rank not in op.missing:
            raise InvariantBroken("a storage operation reported that was not open", op_id=op_id, member=rank)
        op.missing.discard(rank)
        return op
