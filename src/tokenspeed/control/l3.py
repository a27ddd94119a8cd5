"""Storage (L3): the replica's agreement on executors' reports, and the submission of storage work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import StorageOp
from tokenspeed.plane.results import StorageTick


class L3(Protocol):
    def agree(self, *, forward: bool) -> StorageTick | None:
        """This round's storage facts; `forward` is whether model forwards are permitted."""
        ...

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """Hand storage work to the executor; never waits."""
        ...


@attrs.define(eq=False)
class Permission:
    """Writer: NoStorage. The permission the scheduler was last told."""

    forward: bool = True


@attrs.frozen(kw_only=True, eq=False)
class NoStorage:
    """No storage configured: a tick only when forward permission is withdrawn or returns (RA-13)."""

    told: Permission = attrs.field(factory=Permission)

    def agree(self, *, forward: bool) -> StorageTick | None:
        if forward == self.told.forward:
            return None
        self.told.forward = forward
        return StorageTick(forward=forward, storage=False)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        if ops:
            raise InvariantBroken("storage work planned without a storage executor", ops=len(ops))
