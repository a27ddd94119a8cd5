"""Storage in the round: a prompt through the real loop and scheduler, with an executor driven by hand, and its null."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import attrs
import pytest
from rig import SPECS, Rig, hand_rig, request, spied

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.control.l3 import AgreedStorage, NoStorage
from tokenspeed.plane.messages import FlushCacheOp, PauseMode, PauseOp, ResumeOp
from tokenspeed.plane.operations import DiskWeights, ReleaseMemoryOp, ResumeMemoryOp, UpdateWeightsOp
from tokenspeed.plane.plan import Dispatch, ExecutionPlan, LoadBackOp, StorageOp, StorageVerb, WriteBackOp
from tokenspeed.plane.ports import Scheduler, Ticket
from tokenspeed.plane.results import CacheAcks, HeadFacts
from tokenspeed.settings.model import SchedulerSettings, Settings, StorageSettings
from tokenspeed.testing import ScriptedPlane
from tokenspeed.testing.storage import ScriptedStorage


@attrs.define(eq=False)
class AckingPlane(ScriptedPlane):
    """Every cache operation has completed by the next poll."""

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch) -> Ticket:
        ops = plan.device_ops()
        self.acks.append(
            CacheAcks(
                write_backs=tuple(op.op_id for op in ops if isinstance(op, WriteBackOp)),
                load_backs=tuple(op.op_id for op in ops if isinstance(op, LoadBackOp)),
            )
        )
        return super().execute(plan, dispatch)


@attrs.define(eq=False)
class ThreadNoting(ScriptedStorage):
    threads: set[int] = attrs.field(factory=set)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self.threads.add(threading.get_ident())
        super().submit(ops)


def storage_rig() -> tuple[Rig, AckingPlane, ThreadNoting]:
    plane, executor = AckingPlane(), ThreadNoting()
    rig = hand_rig(
        specs=attrs.evolve(SPECS, host_parents=33),
        plane=plane,
        settings=Settings(
            scheduler=SchedulerSettings(overlap=False, chunk_tokens=32), storage=StorageSettings(min_tokens=0)
        ),
        l3=AgreedStorage(mesh=SoloMesh(), workers=executor),
    )
    return rig, plane, executor


def stored_prompt(rig: Rig, executor: ThreadNoting) -> None:
    """A prompt of 40 tokens is computed, its two whole blocks are stored, and all nearer tiers forget them."""
    rig.put(request("a", 40, max_new=1))
    for _ in range(12):
        rig.loop.round()
        executor.serve()
    assert rig.link.finish("a") is not None
    for message in (ReleaseMemoryOp(call_id=1), ResumeMemoryOp(call_id=2)):
        rig.put(message)
        rig.rounds(3)
    assert [reply.success for reply in rig.link.replies] == [True, True]


@pytest.mark.contract("CT-19", "CT-20", "CT-23", "CT-24", "SP-20", "RA-23")
def test_a_prompt_is_stored_and_comes_back_through_the_round() -> None:
    rig, plane, executor = storage_rig()
    stored_prompt(rig, executor)
    assert executor.verbs() == ["query", "put"]
    assert len(executor.stored) == 2
    loop, log = spied(rig.loop, "l3", "plane", "scheduler")
    rig.put(request("b", 40, max_new=2))
    loop.round()
    assert executor.verbs()[2:] == ["query"]
    executor.serve()
    loop.round()
    assert executor.verbs()[2:] == ["query", "get"]
    for _ in range(3):
        # Nothing to do: the loop may sleep until the executor wakes it.
        assert not loop.round()
    executed = len(plane.plans)
    executor.serve()
    del log[:]
    loop.round()
    steps = [entry for entry in log if entry in ("l3.agree", "scheduler.advance_head", "l3.submit", "plane.execute")]
    assert steps == ["l3.agree", "scheduler.advance_head", "l3.submit", "plane.execute"]
    (plan,) = plane.plans[executed:]
    assert [(type(op), len(op.device_blocks)) for op in plan.cache] == [(LoadBackOp, 2)]
    assert plan.batch is not None
    assert plan.batch.starts.tolist() == [32]
    # The control thread submits, and none of it went through the plane.
    assert executor.threads == {threading.get_ident()}
    assert all(not plan.storage_ops() or plan.needs_device() for plan in plane.plans)


@attrs.frozen(eq=False)
class HeadsNoted:
    """A scheduler in front of another that keeps what its heads were told."""

    target: Scheduler
    heads: list[HeadFacts] = attrs.field(factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)

    def advance_head(self, facts: HeadFacts) -> None:
        self.heads.append(facts)
        self.target.advance_head(facts)


@pytest.mark.contract("RA-13", "SP-20", "CT-23", "CT-33")
def test_each_round_has_one_head_with_its_tick_and_all_that_storage_completed_or_gave_up() -> None:
    rig, _, executor = storage_rig()
    stored_prompt(rig, executor)
    noted = HeadsNoted(rig.loop.scheduler)
    loop = attrs.evolve(rig.loop, scheduler=noted)
    executor.now_s, executor.pressure = 7.0, 0.25
    rig.put(request("b", 40, max_new=2), request("c", [9] * 40, max_new=2))
    loop.round()
    first, second = sorted(executor.open)
    executor.finish(first)
    executor.cancel(second)
    for _ in range(4):
        loop.round()
    rig.put(PauseOp(call_id=2, mode=PauseMode.KEEP))
    loop.round()
    loop.round()
    ticks = [head.tick for head in noted.heads]
    assert len(ticks) == 7
    assert (
        [tick.forward for tick in ticks if tick] == [tick.storage for tick in ticks if tick] == [True] * 5 + [False] * 2
    )
    assert {(tick.now_s, tick.pressure) for tick in ticks if tick} == {(7.0, 0.25)}
    told = [([done.op_id for done in tick.completed], list(tick.cancelled)) for tick in ticks if tick]
    assert told[1] == ([first], [second])
    assert [one for one in told if one != ([], [])] == [told[1]]


@pytest.mark.contract("CT-33", "SP-55")
def test_an_abort_while_frozen_gives_a_cancel_and_no_other_storage_work() -> None:
    rig, _, executor = storage_rig()
    stored_prompt(rig, executor)
    rig.put(request("b", 40, max_new=2))
    rig.loop.round()
    executor.serve()
    rig.loop.round()
    get = executor.only(StorageVerb.GET)
    before = len(executor.log)
    rig.put(PauseOp(call_id=2, mode=PauseMode.KEEP))
    rig.loop.round()
    rig.abort("b")
    rig.rounds(3)
    assert [(op.verb, op.op_id) for op in executor.log[before:]] == [(StorageVerb.CANCEL, get.op_id)]
    assert rig.link.finish("b") is not None
    assert rig.loop.scheduler.sizes().held == 0
    executor.cancel(get.op_id)
    rig.put(ResumeOp(call_id=3), request("c", 40, max_new=1))
    rig.rounds(2)
    assert executor.verbs()[before + 1 :] == ["query"]


@pytest.mark.contract("CT-18")
def test_without_storage_a_round_runs_its_null_component_and_nothing_else_of_it() -> None:
    rig = hand_rig(plane=ScriptedPlane(), overlap=False)
    assert isinstance(rig.loop.l3, NoStorage)
    loop, log = spied(rig.loop, "l3", "scheduler")
    rig.put(request("a", 40, max_new=3))
    for _ in range(8):
        loop.round()
    assert {entry for entry in log if entry.startswith("l3.")} == {"l3.agree", "l3.submit"}
    assert "scheduler.advance_head" not in log


@pytest.mark.contract("CP-38")
def test_a_flush_deletes_in_storage_before_any_nearer_tier_forgets() -> None:
    rig, plane, executor = storage_rig()
    rig.put(request("a", 40, max_new=1))
    for _ in range(12):
        rig.loop.round()
        executor.serve()
    executor.refusals = ["storage: no"]
    loop, log = spied(rig.loop, "l3", "plane", "scheduler")
    steps = ("scheduler.can_clear_cache", "l3.clear", "scheduler.clear_cache", "plane.flush_cache")
    rig.put(FlushCacheOp(call_id=1))
    loop.round()
    assert [entry for entry in log if entry in steps] == list(steps[:2])
    (reply,) = rig.link.replies
    assert (reply.success, reply.message) == (False, "flush_cache: storage: no, after 0 s")
    # All is as it was: the prompt is found on the device.
    rig.put(request("b", 40, max_new=1))
    rig.rounds(4)
    assert plane.plans[-1].batch is not None
    assert plane.plans[-1].batch.starts.tolist() == [32]
    for _ in range(6):
        rig.loop.round()
        executor.serve()
    del log[:]
    rig.put(FlushCacheOp(call_id=2))
    loop.round()
    assert [entry for entry in log if entry in steps] == list(steps)
    assert rig.link.replies[-1].success
    assert executor.stored == set()


@pytest.mark.contract("CP-38")
def test_a_flush_that_requests_hold_up_deletes_nothing_in_storage() -> None:
    rig, _, executor = storage_rig()
    executor.stored = {b"something"}
    rig.put(request("a", 40, max_new=30))
    rig.rounds(2)
    executor.serve()
    rig.rounds(2)
    rig.put(FlushCacheOp(call_id=1))
    rig.rounds(1)
    assert [reply.success for reply in rig.link.replies] == [False]
    assert b"something" in executor.stored


@pytest.mark.contract("CP-33")
@pytest.mark.parametrize("refusal", ["", "tensor x has another shape"])
def test_weights_are_published_to_storage_behind_their_commit_and_not_if_the_load_failed(refusal: str) -> None:
    rig, plane, executor = storage_rig()
    plane.refusals.update({"load_weights": refusal} if refusal else {})
    loop, log = spied(rig.loop, "l3", "plane")
    source = DiskWeights(path="there")
    rig.put(UpdateWeightsOp(call_id=1, source=source))
    for _ in range(4):
        loop.round()
    assert [reply.success for reply in rig.link.replies] == [not refusal]
    assert executor.published == ([] if refusal else [source])
    order = [entry for entry in log if entry in ("plane.commit_weights", "l3.operated")]
    assert order == ["plane.commit_weights", "l3.operated"]


def test_an_operation_waits_for_open_storage_work_and_a_pause_does_not() -> None:
    rig, _, executor = storage_rig()
    rig.put(request("a", 40, max_new=1))
    for _ in range(8):
        rig.loop.round()
        for op_id in [op_id for op_id, op in executor.open.items() if op.verb is not StorageVerb.PUT]:
            executor.finish(op_id)
    put = executor.only(StorageVerb.PUT)
    rig.put(PauseOp(call_id=1, mode=PauseMode.WAIT))
    rig.rounds(2)
    assert [reply.success for reply in rig.link.replies] == [True]
    rig.put(ResumeOp(call_id=2), ReleaseMemoryOp(call_id=3))
    rig.rounds(4)
    assert [reply.call_id for reply in rig.link.replies] == [1, 2]
    executor.finish(put.op_id)
    rig.rounds(4)
    assert [(reply.call_id, reply.success) for reply in rig.link.replies][2:] == [(3, True)]
