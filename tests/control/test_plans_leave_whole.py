"""What a plan contains leaves in its round, and the scheduler is told of the outside at its two places only."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
from rig import SPECS, Rig, ScriptedScheduler, hand_rig, one_row_batch, request, spied
from test_storage_rounds import AckingPlane

from tokenspeed.plane.messages import OutputBatch, PauseMode, PauseOp, ResumeOp
from tokenspeed.plane.plan import (
    BlockCopy,
    BlockGrants,
    Dispatch,
    ExecutionPlan,
    GroupBlocks,
    LoadBackOp,
    PlanAbort,
    RemoteStream,
    RestoreBatch,
    RestoreOp,
    SnapshotBatch,
    SnapshotOp,
    StorageOp,
    StorageVerb,
    WriteBackOp,
    index_array,
    int32,
)
from tokenspeed.plane.results import CacheAcks, Rejected, SchedulerEvent, StorageTick
from tokenspeed.scheduler.scheduler import PagedScheduler
from tokenspeed.settings.model import LogSettings, SchedulerSettings, Settings
from tokenspeed.telemetry.meters import NullMeter, prometheus_meter
from tokenspeed.telemetry.registry import new_registry
from tokenspeed.testing import ScriptedPlane


@attrs.define(eq=False)
class Storage:
    """A storage module that keeps what it was given, by round."""

    given: list[tuple[StorageOp, ...]] = attrs.field(factory=list)
    open: int = 0

    def agree(self, *, forward: bool) -> StorageTick | None:
        del forward
        return None

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self.given.append(tuple(ops))

    def clear(self) -> str:
        return ""

    def operated(self, op: object, refusal: str) -> None:
        return None


@attrs.define(eq=False)
class Peer:
    role: str = "plain"
    begun: list[tuple[int, ...]] = attrs.field(factory=list)

    def started(self, rows: tuple[int, ...]) -> None:
        self.begun.append(rows)

    def poll(self) -> tuple[SchedulerEvent, ...]:
        return ()


def full_plan() -> ExecutionPlan:
    """Something of every kind."""
    return ExecutionPlan(
        round_id=7,
        batch=one_row_batch(0, 0, [1, 2, 3]),
        seated=(0,),
        grants=(BlockGrants(slots=index_array([0]), indices=int32([0]), blocks=int32([3])),),
        remote_prefill=(RemoteStream(row=1, rid="b", slot=1, pages=(GroupBlocks(blocks=(4,)),)),),
        remote_decode=(RemoteStream(row=2, rid="c", slot=2, pages=(GroupBlocks(blocks=(5,)),)),),
        cache=(
            WriteBackOp(op_id=1, group=0, device_blocks=(6,), host_blocks=(1,)),
            LoadBackOp(op_id=2, group=0, host_blocks=(2,), device_blocks=(7,)),
            SnapshotBatch(ops=(SnapshotOp(op_id=3, slot=3, tail=(GroupBlocks(blocks=(8,)),), image=0),)),
            RestoreBatch(ops=()),
            StorageOp(op_id=4, verb=StorageVerb.QUERY, keys=(b"k",)),
        ),
        pages_to_copy=(BlockCopy(source=9, destination=10),),
        pages_to_zero=(GroupBlocks(blocks=(11,)),),
        aborts=(PlanAbort(row=4, reason="full"),),
        retired=(4,),
        preempted=(5,),
    )


def plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    return value


STREAM = RemoteStream(row=1, rid="b", slot=1, pages=(GroupBlocks(blocks=(4,)),))
PARTS: dict[str, dict[str, object]] = {
    "batch": {"batch": one_row_batch(0, 0, [1])},
    "store": {"cache": (WriteBackOp(op_id=1, group=0, device_blocks=(3,), host_blocks=(0,)),)},
    "load": {"cache": (LoadBackOp(op_id=1, group=0, device_blocks=(3,), host_blocks=(0,)),)},
    "image": {"cache": (SnapshotBatch(ops=(SnapshotOp(op_id=1, slot=0, tail=(), image=0),)),)},
    "restore": {"cache": (RestoreBatch(ops=(RestoreOp(op_id=1, slot=0, pages=(), tail=(), image=0),)),)},
    "prefill elsewhere": {"remote_prefill": (STREAM,)},
    "decode elsewhere": {"remote_decode": (STREAM,)},
    "copy": {"pages_to_copy": (BlockCopy(source=1, destination=2),)},
    "zero": {"pages_to_zero": (GroupBlocks(blocks=(1,)),)},
    "storage": {"cache": (StorageOp(op_id=1, verb=StorageVerb.PUT, keys=(b"k",), host_blocks=(1,)),)},
    "ends": {"aborts": (PlanAbort(row=0, reason="full"),), "retired": (0,), "preempted": (1,)},
    "nothing": {},
}


@pytest.mark.contract("SP-25")
@pytest.mark.parametrize("part", PARTS)
def test_a_plan_needs_the_device_exactly_when_a_part_of_it_is_the_devices(part: str) -> None:
    plan = ExecutionPlan(round_id=1, **PARTS[part])  # type: ignore[arg-type]
    assert plan.needs_device() is (part not in ("storage", "ends", "nothing"))
    stored = PARTS["storage"]["cache"]
    assert plan._replace(cache=(*plan.cache, *stored)).needs_device() is plan.needs_device()  # type: ignore[misc]


@pytest.mark.contract("SP-24", "SP-35")
def test_a_plan_keeps_its_streams_apart_and_is_equal_after_the_queue() -> None:
    plan = full_plan()
    streams = {"batch", "remote_prefill", "remote_decode", "cache", "pages_to_copy", "pages_to_zero", "aborts"}
    assert streams <= set(ExecutionPlan._fields)
    plane = ScriptedPlane()
    plane.execute(plan, Dispatch())
    (taken,) = plane.plans
    assert plain(taken) == plain(plan)
    assert plain(pickle.loads(pickle.dumps(plan))) == plain(plan)


@pytest.mark.contract("SP-32", "RA-23", "RA-22")
def test_everything_planned_goes_out_in_the_round_that_planned_it() -> None:
    draw = random.Random(5)
    whole = full_plan()
    plans = []
    for number in range(60):
        kinds = ("remote_prefill", "remote_decode", "cache", "pages_to_copy", "pages_to_zero")
        left_out = {name: () for name in kinds if draw.random() < 0.5}
        bare = whole._replace(round_id=number, batch=None, seated=(), grants=(), aborts=(), retired=(), preempted=())
        plans.append(bare._replace(**left_out))
    scheduler, plane, storage = ScriptedScheduler(plans=list(plans)), ScriptedPlane(), Storage()
    rig = hand_rig(scheduler=scheduler, plane=plane, l3=storage)
    for plan in plans:
        before, calls = len(plane.plans), len(storage.given)
        rig.loop.round()
        assert storage.given[calls:] == [plan.storage_ops()]
        assert [id(sent) for sent in plane.plans[before:]] == ([id(plan)] if plan.needs_device() else [])


@pytest.mark.contract("SP-7", "SP-8", "SP-9", "KM-19", "KM-23")
@pytest.mark.parametrize("line_s", [0.001, 1000.0], ids=["batch line", "no batch line"])
@pytest.mark.parametrize("metrics", [True, False])
def test_over_many_rounds_the_scheduler_is_told_and_asked_no_more_than_it_should_be(
    metrics: bool, line_s: float
) -> None:
    plane = AckingPlane()
    meter = prometheus_meter(new_registry("m", process=False)) if metrics else NullMeter()
    settings = Settings(
        log=LogSettings(interval_s=line_s), scheduler=SchedulerSettings(chunk_tokens=32, max_waiting=64)
    )
    rig = hand_rig(specs=attrs.evolve(SPECS, host_parents=33), settings=settings, plane=plane, meter=meter)
    loop, log = spied(rig.loop, "scheduler", "cache_ops", "l3")
    draw, frozen, heads = random.Random(3), False, 0
    for number in range(250):
        rig.clock.advance(0.002)
        if draw.random() < 0.1:
            rig.put(request(f"r{number}", [number + 1] * draw.randint(1, 60), max_new=draw.randint(1, 12)))
        edge = number % 40 == 39
        if edge:
            rig.put(ResumeOp(call_id=number) if frozen else PauseOp(call_id=number, mode=PauseMode.KEEP))
            frozen = not frozen
        due = edge or (rig.loop.cache_ops.open > 0 and bool(plane.acks) and bool(plane.acks[0]))
        begin = len(log)
        loop.round()
        of_round = log[begin:]
        heads += due
        assert of_round.count("scheduler.advance_head") == due
        assert of_round.count("scheduler.advance") <= 1
        # One for planning, one for the report; a round that admits asks how long the queue is.
        assert of_round.count("scheduler.sizes") <= 2 + ("scheduler.submit" in of_round)
        assert "scheduler.available_lcm_blocks" not in of_round
        if due:
            assert of_round.index("scheduler.advance_head") < of_round.index("scheduler.next_execution_plan")
        if "scheduler.advance" in of_round:
            assert of_round.index("scheduler.advance") > of_round.index("scheduler.next_execution_plan")
    assert log.count("scheduler.advance") > 50
    assert heads > 20


@pytest.mark.contract("KM-24")
def test_a_drain_asks_for_the_counts_only_when_nothing_is_open() -> None:
    store = WriteBackOp(op_id=1, group=0, device_blocks=(3,), host_blocks=(1,))
    scheduler = ScriptedScheduler(plans=[ExecutionPlan(round_id=1, cache=(store,))])
    plane = ScriptedPlane()
    rig = hand_rig(scheduler=scheduler, plane=plane)
    rig.put(PauseOp(call_id=7, mode=PauseMode.WAIT))
    loop, log = spied(rig.loop, "scheduler")

    def asked_at_the_end() -> bool:
        begin = len(log)
        loop.round()
        tail = log[begin:]
        # The report of the round's end asks once; a drain that may be over asks again.
        return tail[tail.index("scheduler.drain_kv_events") :].count("scheduler.sizes") == 2

    assert not asked_at_the_end()
    assert rig.link.replies == []
    plane.acks.append(CacheAcks(write_backs=(1,)))
    assert asked_at_the_end()
    assert [reply.call_id for reply in rig.link.replies] == [7]


@pytest.mark.contract("IS-24")
def test_transfers_begin_once_the_submission_succeeded_and_not_before() -> None:
    peer = Peer()
    scheduler = ScriptedScheduler(verdict=Rejected(message="no"))
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), pd=peer)
    rig.put(request("a", 3))
    rig.loop.round()
    assert scheduler.submitted
    assert peer.begun == []
    scheduler.verdict = ScriptedScheduler().verdict
    rig.put(request("b", 3))
    rig.loop.round()
    assert peer.begun == [scheduler.submitted[-1]]


def mirrors() -> tuple[Rig, Rig]:
    """Two members of a replica: each has the whole control plane, and hears the same messages."""
    return hand_rig(), hand_rig()


def held(rig: Rig) -> set[str]:
    scheduler = rig.loop.scheduler
    assert isinstance(scheduler, PagedScheduler)
    return {rid for rid, row in rig.loop.table.by_rid.items() if scheduler.holds(row)}


@pytest.mark.contract("IS-12", "IS-25")
def test_duplicates_and_rejections_are_the_same_on_every_member() -> None:
    members, draw = mirrors(), random.Random(9)
    refused: list[list[str]] = [[], []]
    for number in range(200):
        messages = []
        for _ in range(draw.randint(0, 2)):
            rid = f"r{draw.randint(0, 40)}"
            too_long = draw.random() < 0.2
            messages.append(request(rid, draw.randint(1, 30), max_new=5000 if too_long else draw.randint(1, 6)))
        for member in members:
            member.put(*messages)
            member.loop.round()
        assert held(members[0]) == held(members[1]), number
    for member, seen in zip(members, refused, strict=True):
        for sent in member.link.sent:
            assert isinstance(sent, OutputBatch)
            seen += [f"{rid} {status}" for rid, status in zip(sent.rids, sent.status, strict=True) if status]
    assert refused[0] == refused[1]
