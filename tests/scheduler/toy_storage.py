"""A storage backend for the toy device: what a PUT read and a GET wrote shows in the tokens."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from scheduler_rig import Rig, build
from toy_groups import GARBAGE

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.control.l3 import AgreedStorage
from tokenspeed.plane.plan import ExecutionPlan, StorageOp, StorageVerb
from tokenspeed.plane.results import HeadFacts, StorageTick
from tokenspeed.testing.storage import ScriptedStorage


@attrs.define(eq=False)
class StoredRig:
    """Rounds with a storage tick each; operations end when they are told to.

    A PUT reads its blocks, and a GET writes them, at the very end; until then there is garbage in a GET's.

    Attributes:
        contents: by key.
        served: operations end by themselves in the round after their plan.
    """

    rig: Rig
    executor: ScriptedStorage
    l3: AgreedStorage
    contents: dict[bytes, list[int]] = attrs.field(factory=dict)
    served: bool = True
    forward: bool = True
    ticks: list[StorageTick] = attrs.field(factory=list)

    def head(self) -> None:
        tick = self.l3.agree(forward=self.forward)
        self.ticks.append(tick)
        self.rig.scheduler.advance_head(HeadFacts(tick=tick))

    def plan(self) -> ExecutionPlan:
        if self.served:
            self.serve()
        self.head()
        plan = self.rig.plan()
        for op in plan.storage_ops():
            if op.verb is StorageVerb.GET:
                for key, block in zip(op.keys, op.host_blocks, strict=True):
                    self.rig.host.blocks[group_of(key), block] = [GARBAGE]
        self.l3.submit(plan.storage_ops())
        return plan

    def round(self) -> ExecutionPlan:
        plan = self.plan()
        self.rig.land(down_to=self.rig.depth if plan.batch is not None else 0)
        return plan

    def run(self, *, rounds: int = 400, until: Callable[[], bool] | None = None) -> list[ExecutionPlan]:
        plans = []
        for _ in range(rounds):
            if until() if until else not self.rig.scheduler.sizes().held:
                return plans
            plans.append(self.round())
        raise AssertionError(f"not done after {rounds} rounds: {self.rig.scheduler.sizes()}, {self.executor.open}")

    def serve(self) -> None:
        for op_id in sorted(self.executor.open):
            self.end(op_id)

    def end(self, op_id: int, *, fails: Callable[[int], bool] = lambda at: False) -> None:
        """The operation ends; keys at which `fails` says so do not succeed."""
        op = self.executor.open[op_id]
        self.executor.finish(op_id, *(not fails(at) and self._do(op, at) for at in range(len(op.keys))))

    def settle(self) -> None:
        """Rounds until nothing is under way, neither in the host tier nor in storage."""
        for _ in range(100):
            if not self.round().cache and not self.executor.open and not self.rig.host.pending:
                return
        raise AssertionError("storage does not come to rest")

    def of(self, verb: StorageVerb) -> list[StorageOp]:
        return [op for op in self.executor.log if op.verb is verb]

    def _do(self, op: StorageOp, at: int) -> bool:
        key = op.keys[at]
        if op.verb is StorageVerb.QUERY:
            return key in self.contents
        place = (group_of(key), op.host_blocks[at])
        if op.verb is StorageVerb.PUT:
            self.contents[key] = list(self.rig.host.blocks[place])
            return True
        if key in self.contents:
            self.rig.host.blocks[place] = list(self.contents[key])
            return True
        return False


def group_of(key: bytes) -> int:
    return int.from_bytes(key[:2], "little")


def stored_rig(**changes: object) -> StoredRig:
    base: dict[str, object] = {"host_parents": 33, "storage": True, "max_num_seqs": 4}
    executor = ScriptedStorage()
    return StoredRig(
        rig=build(**{**base, **changes}), executor=executor, l3=AgreedStorage(mesh=SoloMesh(), workers=executor)
    )
