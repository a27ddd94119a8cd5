"""Rounds of several ranks side by side: what they exchange, and what each does by itself."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import pytest
from rig import SPECS, Rig, ScriptedScheduler, hand_rig, request, spied
from test_plans_leave_whole import plain

from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.gate import DpStep
from tokenspeed.plane.messages import FlushCacheOp
from tokenspeed.plane.plan import (
    Dispatch,
    ExecutionPlan,
    GroupBlocks,
    LoadBackOp,
    RemoteStream,
    RestoreOp,
    SnapshotOp,
    WriteBackOp,
)
from tokenspeed.plane.ports import Mesh, Ticket
from tokenspeed.plane.results import CacheAcks, ForwardResult
from tokenspeed.settings.model import Retraction, SchedulerSettings, Settings
from tokenspeed.testing import ScriptedPlane, memory_mesh

T = TypeVar("T")


def together(acts: Sequence[Callable[[], None]]) -> None:
    """Each on a thread of its own, as collectives need."""
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


@attrs.define(eq=False)
class NotedMesh:
    """A member's `Mesh` that keeps what it gave to the others."""

    inner: Mesh
    given: list[object] = attrs.field(factory=list)

    @property
    def size(self) -> int:
        return self.inner.size

    def gather(self, value: T) -> tuple[T, ...]:
        self.given.append(value)
        return self.inner.gather(value)


def dp_ranks(**parts: Sequence[object]) -> list[tuple[Rig, NotedMesh]]:
    """Two replicas that share nothing but the attention-DP step; `parts`: by name, one for each."""
    ranks = []
    for at, mesh in enumerate(memory_mesh(2)):
        rig, noted = hand_rig(**{name: each[at] for name, each in parts.items()}, overlap=False), NotedMesh(mesh)  # type: ignore[arg-type]
        ranks.append((attrs.evolve(rig, loop=attrs.evolve(rig.loop, dp_step=DpStep(mesh=noted))), noted))
    return ranks


@pytest.mark.contract("SP-2", "SP-27")
def test_replicas_plan_by_themselves_exchange_their_sizes_and_forward_equally_often() -> None:
    ranks = dp_ranks()
    (first, _), (second, _) = ranks
    first.put(request("a", 70, max_new=9), request("b", 4, max_new=2))

    def serve(rig: Rig) -> None:
        for number in range(25):
            if rig is second and number in (4, 6):
                rig.put(request(f"c{number}", 30 + number, max_new=6))
            rig.loop.round()

    together([lambda rig=rig: serve(rig) for rig, _ in ranks])  # type: ignore[misc]
    batches = [[plan.batch.num_tokens for plan in rig.plane.plans if plan.batch is not None] for rig, _ in ranks]
    assert batches[0] != batches[1]
    assert [len(first.link.tokens(rid)) for rid in ("a", "b")] == [9, 2]
    assert [len(second.link.tokens(rid)) for rid in ("c4", "c6")] == [6, 6]
    forwards = [rig.plane.names().count("execute") + rig.plane.names().count("idle_forward") for rig, _ in ranks]
    assert forwards[0] == forwards[1]
    assert all("idle_forward" in rig.plane.names() for rig, _ in ranks)
    for (_, mesh), own in zip(ranks, batches, strict=True):
        assert [type(value) for value in mesh.given] == [int] * 25
        assert [value for value in mesh.given if value] == own


@pytest.mark.contract("SP-27")
def test_a_transfer_without_tokens_is_no_work_of_the_model() -> None:
    stream = RemoteStream(row=0, rid="a", slot=0, pages=(GroupBlocks(blocks=(3,)),))
    receiving = ScriptedScheduler(plans=[ExecutionPlan(round_id=1, remote_prefill=(stream,))])
    ranks = dp_ranks(scheduler=(receiving, ScriptedScheduler()), plane=(ScriptedPlane(), ScriptedPlane()))
    together([rig.loop.round for rig, _ in ranks])
    assert [mesh.given for _, mesh in ranks] == [[0], [0]]
    assert [rig.plane.names() for rig, _ in ranks] == [["execute"], []]


@attrs.frozen
class LastStage:
    """`Pipeline` over a mesh whose last member is the last stage."""

    mesh: Mesh

    def adopt_last_stage(self, result: ForwardResult) -> ForwardResult:
        return self.mesh.gather(result)[-1]


@pytest.mark.contract("RA-47")
@pytest.mark.parametrize("overlap", [False, True])
def test_every_stage_adopts_the_last_ones_result_before_each_commit(overlap: bool) -> None:
    blind = ScriptedPlane(answer=lambda batch: ForwardResult(tokens=[7] * int(batch.samples.sum())))
    planes: tuple[ScriptedPlane | None, ScriptedPlane | None] = (blind, None)
    stages: list[tuple[Rig, EventLoop, list[str]]] = []
    for mesh, plane in zip(memory_mesh(2), planes, strict=True):
        rig = hand_rig(plane=plane, pipeline=LastStage(mesh), overlap=overlap)
        loop, log = spied(rig.loop, "plane", "pipeline", "output", "scheduler")
        rig.put(request("a", 40, max_new=5), request("b", 9, max_new=3))
        stages.append((rig, loop, log))

    def serve(loop: EventLoop) -> None:
        for _ in range(14):
            loop.round()

    together([lambda loop=loop: serve(loop) for _, loop, _ in stages])  # type: ignore[misc]
    steps = ("plane.commit", "pipeline.adopt_last_stage", "output.commit")
    for rig, _, log in stages:
        commits = [entry for entry in log if entry in steps]
        assert commits == list(steps) * rig.plane.names().count("execute") != []
        assert rig.link.finish("a") == rig.link.finish("b") == (2, 0, "")
    assert stages[0][0].link.tokens("a") == stages[1][0].link.tokens("a") != [7] * 5


@attrs.define(eq=False)
class Dawdling(ScriptedPlane):
    """A device whose cache operations take a while, each another one."""

    polls: int = 0
    due: list[tuple[int, str, int]] = attrs.field(factory=list)
    dice: random.Random = attrs.field(factory=random.Random)

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch) -> Ticket:
        self.due += [(self.polls + self.dice.randrange(1, 9), KINDS[type(op)], op.op_id) for op in plan.device_ops()]
        return super().execute(plan, dispatch)

    def poll_cache_results(self) -> CacheAcks:
        self.polls += 1
        ended = [(kind, op_id) for at, kind, op_id in self.due if at <= self.polls]
        self.due = [one for one in self.due if one[0] > self.polls]
        return CacheAcks(**{kind: tuple(op for name, op in ended if name == kind) for kind in KINDS.values()})


KINDS: dict[type, str] = {
    WriteBackOp: "write_backs",
    LoadBackOp: "load_backs",
    SnapshotOp: "snapshots",
    RestoreOp: "restores",
}


@pytest.mark.contract("CT-9", "CT-11", "SP-1", "SP-19")
def test_plans_of_two_members_stay_equal_however_differently_long_their_copies_take() -> None:
    planes = [Dawdling(dice=random.Random(seed)) for seed in (1, 2)]
    chain = (Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT)
    settings = Settings(scheduler=SchedulerSettings(chunk_tokens=32, max_waiting=64, retraction=chain))
    specs = attrs.evolve(SPECS, num_pages=17, host_parents=65, images=2)
    members = [
        hand_rig(mesh=mesh, specs=specs, settings=settings, plane=plane)
        for mesh, plane in zip(memory_mesh(2), planes, strict=True)
    ]
    counts: list[list[int]] = [[], []]

    def serve(at: int) -> None:
        draw = random.Random(9)
        for number in range(120):
            if at == 0 and draw.random() < 0.25:
                stem = [draw.randrange(3) + 1] * draw.choice((0, 16, 48))
                members[0].put(request(f"r{number}", [*stem, number + 5, 7], max_new=draw.randint(1, 60)))
            members[at].loop.round()
            counts[at].append(members[at].loop.cache_ops.open)

    together([lambda: serve(0), lambda: serve(1)])
    assert counts[0] == counts[1]
    plans = [[plain(plan) for plan in plane.plans] for plane in planes]
    assert plans[0] == plans[1]
    did = Counter(type(op) for plan in planes[0].plans for op in plan.device_ops())
    assert set(did) == set(KINDS)
    assert planes[0].dice.random() != planes[1].dice.random()


@pytest.mark.contract("RA-12")
def test_every_rank_asks_the_gate_in_every_round_and_an_operation_passes_on_all_in_the_same_one() -> None:
    members = [hand_rig(mesh=mesh) for mesh in memory_mesh(2)]
    loops = [spied(member.loop, "gate", "scheduler", "l3") for member in members]
    members[0].put(request("a", 5, max_new=3))
    cleared: list[list[int]] = [[], []]

    def serve(at: int) -> None:
        loop, log = loops[at]
        for number in range(12):
            if number == 8 and at == 0:
                members[0].put(FlushCacheOp(call_id=1, timeout_s=5.0))
            begin = len(log)
            loop.round()
            of_round = log[begin:]
            assert of_round.count("gate.passes") == 1
            # The last step of the admission: nothing but what passed it comes before the head.
            behind = of_round[of_round.index("gate.passes") + 1 : of_round.index("l3.agree")]
            assert set(behind) <= {"scheduler.can_clear_cache", "l3.clear", "scheduler.clear_cache"}
            cleared[at] += [number] * behind.count("scheduler.clear_cache")

    together([lambda: serve(0), lambda: serve(1)])
    assert cleared[0] == cleared[1] == [8]
