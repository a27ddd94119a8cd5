"""The order of one round, shown by spies in front of every component."""

from __future__ import annotations

import ast
import inspect
import textwrap

import attrs
import pytest
from rig import ScriptedScheduler, hand_rig, landed_rows, one_row_batch, request, spied

from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.grammar import Settled
from tokenspeed.plane.grammar import NO_GRAMMARS, GrammarPlan
from tokenspeed.plane.messages import FlushCacheOp, PauseMode, PauseOp, ResumeOp
from tokenspeed.plane.plan import ExecutionPlan, PlanAbort, StorageOp, StorageVerb, WriteBackOp
from tokenspeed.plane.results import AllBlocksCleared, CacheAcks, ForwardResult, Rejected, StorageTick, TransferDone
from tokenspeed.testing import ScriptedPlane


def order(log: list[str], *names: str) -> list[str]:
    """The calls in `names`, in the order in which they happened."""
    return [entry for entry in log if entry in names]


@attrs.define(eq=False)
class StoredOps:
    """A storage module that grants everything and remembers submissions."""

    ops: list[StorageOp] = attrs.field(factory=list)
    open: int = 0

    def agree(self, *, forward: bool) -> StorageTick | None:
        return StorageTick(forward=forward, storage=True)

    def submit(self, ops: object) -> None:
        self.ops.extend(ops)  # type: ignore[call-overload]

    def clear(self) -> str:
        return ""

    def operated(self, op: object, refusal: str) -> None:
        return None


@attrs.define(eq=False)
class OneTransfer:
    done: bool = False
    role: str = "plain"

    def started(self, rows: tuple[int, ...]) -> None:
        return None

    def poll(self) -> tuple[TransferDone, ...]:
        return (TransferDone(row=0, ok=True),)


@pytest.mark.contract("RA-5", "RA-6", "RA-9", "RA-10", "RA-11", "RA-12", "RA-14", "RA-15", "RA-19", "RA-48", "RA-49")
def test_a_round_calls_its_components_in_the_contracts_order() -> None:
    scheduler = ScriptedScheduler(plans=[ExecutionPlan(round_id=1, batch=one_row_batch(0, 0, [1, 2, 3]))])
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), l3=StoredOps(), overlap=False)
    rig.put(request("a", 3, max_new=1), FlushCacheOp(call_id=1), PauseOp(call_id=2, mode=PauseMode.WAIT))
    loop, log = spied(rig.loop)
    loop.round()
    once = [
        "frontend.receive",
        "relay.share",
        "control_ops.route",
        "ingress.admit",
        "output.refuse",
        "grammar.queue",
        "epd.stage",
        "scheduler.submit",
        "grammar.ready",
        "epd.ready",
        "gate.passes",
        "l3.agree",
        "cache_ops.poll",
        "scheduler.advance_head",
        "scheduler.next_execution_plan",
        "cache_ops.note",
        "meter.round",
        "dp_step.idle_forward_due",
        "l3.submit",
        "ingress.seats",
        "plane.execute",
        "eplb.note",
        "plane.commit",
        "pipeline.adopt_last_stage",
        "output.commit",
        "pd.poll",
        "scheduler.advance",
        "scheduler.drain_kv_events",
        "kv_events.publish",
        "plane.release",
        "output.take",
        "frontend.send",
        "control_ops.resolve",
        "control_ops.take_replies",
        "frontend.reply",
    ]
    assert order(log, *once) == [*once, "frontend.reply"]  # of the flush and of the pause
    assert log[0] == "frontend.receive"


@pytest.mark.contract("RA-19")
def test_what_the_plan_aborted_is_finished_before_the_round_is_recorded_and_the_others_agree() -> None:
    plan = ExecutionPlan(
        round_id=2,
        batch=one_row_batch(0, 0, [1, 2, 3]),
        aborts=(PlanAbort(row=1, reason="no pages"),),
        retired=(1,),
        cache=(WriteBackOp(op_id=1, group=0, device_blocks=(3,), host_blocks=(0,)),),
    )
    scheduler = ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.put(request("a", 3), request("b", 3))
    rig.rounds(1)
    scheduler.plans.append(plan)
    loop, log = spied(rig.loop)
    loop.round()
    steps = [
        "scheduler.next_execution_plan",
        "cache_ops.note",
        "output.end",
        "meter.round",
        "dp_step.idle_forward_due",
        "output.logprob_plan",
        "history.seeds",
        "grammar.plan",
        "plane.execute",
    ]
    assert order(log, *steps) == steps
    assert rig.link.finish("b") == (3, 503, "no pages")


@pytest.mark.contract("RA-49", "RA-50")
def test_outputs_of_a_round_leave_before_its_control_replies() -> None:
    rig = hand_rig()
    rig.put(request("a", 3, max_new=50))
    rig.rounds(3)
    rig.put(PauseOp(call_id=7, mode=PauseMode.ABORT))
    rig.settle()
    ends = [i for i, entry in enumerate(rig.link.log) if getattr(entry, "finished", None) and any(entry.finished)]
    replies = [i for i, entry in enumerate(rig.link.log) if getattr(entry, "call_id", None) == 7]
    assert len(ends) == 1
    assert len(replies) == 1
    assert ends[0] < replies[0]


@pytest.mark.contract("RA-13", "RA-16", "RA-17")
def test_a_frozen_round_commits_everything_first_and_ticks_once_on_each_edge() -> None:
    scheduler = ScriptedScheduler(
        plans=[
            ExecutionPlan(round_id=1, batch=one_row_batch(0, 0, [1, 2, 3])),
            ExecutionPlan(round_id=2, cache=(WriteBackOp(op_id=1, group=0, device_blocks=(3,), host_blocks=(0,)),)),
        ]
    )
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.put(request("a", 3))
    loop, log = spied(rig.loop)
    loop.round()
    assert len(rig.loop.state.in_flight) == 1
    rig.put(PauseOp(call_id=1, mode=PauseMode.KEEP))
    log.clear()
    loop.round()
    assert order(log, "plane.commit", "scheduler.next_execution_plan", "plane.execute") == [
        "plane.commit",
        "scheduler.next_execution_plan",
        "plane.execute",
    ]
    rig.plane.acks.append(CacheAcks(write_backs=(1,)))
    loop.round()
    rig.put(ResumeOp(call_id=2))
    loop.round()
    loop.round()
    ticks = [facts.tick for facts in scheduler.heads if facts.tick is not None]
    assert [tick.forward for tick in ticks] == [False, True]


@pytest.mark.contract("RA-14", "SP-19")
def test_acknowledgments_are_polled_only_while_a_cache_operation_is_open() -> None:
    plan = ExecutionPlan(round_id=1, cache=(WriteBackOp(op_id=4, group=0, device_blocks=(3,), host_blocks=(0,)),))
    scheduler = ScriptedScheduler(plans=[plan])
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.rounds(1)
    assert rig.plane.names().count("poll_cache_results") == 0
    rig.rounds(2)
    assert rig.plane.names().count("poll_cache_results") == 2
    rig.plane.acks.append(CacheAcks(write_backs=(4,)))
    rig.rounds(1)
    assert scheduler.heads[-1].acks.write_backs == (4,)
    before = rig.plane.names().count("poll_cache_results")
    rig.rounds(3)
    assert rig.plane.names().count("poll_cache_results") == before


@pytest.mark.contract("RA-23")
def test_storage_work_is_submitted_before_the_plan_is_queued() -> None:
    op = StorageOp(op_id=1, verb=StorageVerb.GET, keys=(b"k",))
    plan = ExecutionPlan(round_id=1, batch=one_row_batch(0, 0, [1]), cache=(op,))
    storage = StoredOps()
    rig = hand_rig(scheduler=ScriptedScheduler(plans=[plan]), plane=ScriptedPlane(), l3=storage)
    rig.put(request("a", 1))
    loop, log = spied(rig.loop, "l3", "plane")
    loop.round()
    assert order(log, "l3.submit", "plane.execute") == ["l3.submit", "plane.execute"]
    assert storage.ops == [op]


@pytest.mark.contract("RA-22", "DP-7", "SP-25")
def test_a_round_executes_once_if_the_plan_needs_the_device_and_never_otherwise() -> None:
    rig = hand_rig()
    for i in range(40):
        rig.put(request(f"r{i}", 5 + 3 * i, max_new=1 + i % 7))
    for _ in range(500):
        before = len(rig.plane.plans)
        rig.loop.round()
        queued = rig.plane.plans[before:]
        assert len(queued) <= 1
        assert all(plan.needs_device() for plan in queued)
    assert rig.plane.names().count("execute") > 20
    assert all(rig.link.finish(f"r{i}") for i in range(40))
    idle = rig.plane.names().count("execute")
    rig.rounds(100)
    assert rig.plane.names().count("execute") == idle


@pytest.mark.contract("SP-17", "SP-22", "RA-48")
def test_the_tail_advance_gets_results_and_transfers_in_one_call() -> None:
    scheduler = ScriptedScheduler(plans=[ExecutionPlan(round_id=1, batch=one_row_batch(0, 0, [1, 2]))])
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), pd=OneTransfer(), overlap=False)
    rig.put(request("a", 2))
    rig.rounds(1)
    assert len(scheduler.tails) == 1
    assert landed_rows(scheduler.tails[0]) == [0]
    assert isinstance(scheduler.tails[0][-1], TransferDone)


@pytest.mark.contract("RA-44", "RA-45")
def test_rebalance_and_garbage_hooks_hear_of_every_round_that_forwarded() -> None:
    rig = hand_rig(overlap=False)
    loop, log = spied(rig.loop, "eplb", "plane")
    rig.put(request("a", 5, max_new=6))
    for _ in range(20):
        loop.round()
    assert log.count("eplb.note") == 20
    assert log.count("plane.note_forwarded") == log.count("plane.execute") == 6
    rounds = [entry for entry in log if entry in ("plane.execute", "eplb.note", "plane.note_forwarded")]
    assert rounds[:18] == ["plane.execute", "eplb.note", "plane.note_forwarded"] * 6


@pytest.mark.contract("RA-46", "DO-6", "DO-7", "DO-8")
@pytest.mark.parametrize("overlap", [False, True])
def test_commits_go_down_to_the_depth_and_to_zero_without_new_work(overlap: bool) -> None:
    rig = hand_rig(overlap=overlap)
    rig.put(request("a", 5, max_new=5))
    deepest = 0
    for _ in range(20):
        before = len(rig.plane.plans)
        rig.loop.round()
        flying = len(rig.loop.state.in_flight)
        deepest = max(deepest, flying)
        if len(rig.plane.plans) == before:
            assert flying == 0
    assert deepest == (1 if overlap else 0)
    assert rig.link.finish("a")


@pytest.mark.contract("RA-21", "DO-9")
def test_a_batch_that_depends_on_an_uncommitted_forward_commits_the_queue_first() -> None:
    @attrs.frozen(eq=False)
    class Eager:
        seen: list[int] = attrs.field(factory=list)

        def refuses(self, sampling: object) -> str:
            return ""

        def queue(self, rows: tuple[int, ...]) -> tuple[int, ...]:
            return rows

        def ready(self) -> Settled:
            return Settled()

        def waiting(self) -> tuple[int, ...]:
            return ()

        def cancel(self, rows: tuple[int, ...]) -> tuple[int, ...]:
            return ()

        def needs_commit_first(self, batch: object) -> bool:
            return True

        def plan(self, plan: object) -> GrammarPlan:
            self.seen.append(len(rig.loop.state.in_flight))
            return NO_GRAMMARS

        def adopt(self, batch: object, result: ForwardResult) -> ForwardResult:
            return result

        def release(self, rows: tuple[int, ...]) -> None:
            return None

    eager = Eager()
    rig = hand_rig(grammar=eager)
    rig.put(request("a", 5, max_new=6))
    rig.settle()
    assert len(eager.seen) == 6
    assert set(eager.seen) == {0}
    plain = hand_rig()
    plain.put(request("a", 5, max_new=6))
    plain.settle()
    assert plain.link.tokens("a") == rig.link.tokens("a")


@pytest.mark.contract("IS-5", "IS-21", "OL-16", "IS-23")
def test_a_rejected_batch_ends_its_requests_with_a_client_error_and_the_engine_goes_on() -> None:
    scheduler = ScriptedScheduler(on_submit=lambda rows: Rejected(message="the pool has 3 pages"))
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.put(request("a", 3), request("b", 3))
    rig.rounds(1)
    assert rig.link.finish("a") == (3, 400, "the pool has 3 pages")
    assert rig.link.finish("b") == (3, 400, "the pool has 3 pages")
    assert rig.loop.table.live == 0
    scheduler.on_submit = None
    rig.put(request("c", 1, max_new=1))
    rig.rounds(1)
    (row,) = scheduler.submitted[-1]
    scheduler.plans.append(ExecutionPlan(round_id=9, batch=one_row_batch(row, 0, [1])))
    rig.rounds(2)
    assert rig.link.finish("c") == (2, 0, "")


@pytest.mark.contract("OL-15", "SP-41", "RA-19")
def test_a_request_the_plan_aborted_ends_at_once_and_no_event_names_it() -> None:
    scheduler = ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.put(request("a", 3))
    rig.rounds(1)
    scheduler.plans.append(ExecutionPlan(round_id=2, aborts=(PlanAbort(row=0, reason="no pages"),), retired=(0,)))
    rig.rounds(2)
    assert rig.link.finish("a") == (3, 503, "no pages")
    assert scheduler.tails == []
    assert rig.loop.table.live == 0


@pytest.mark.contract("KM-1", "SP-15", "PT-27")
def test_cache_events_are_drained_once_a_round_behind_the_tail_advance() -> None:
    scheduler = ScriptedScheduler(plans=[ExecutionPlan(round_id=1, batch=one_row_batch(0, 0, [1]))])
    scheduler.events.append(AllBlocksCleared())
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), overlap=False)
    rig.put(request("a", 1))
    loop, log = spied(rig.loop, "scheduler", "kv_events")
    for _ in range(4):
        loop.round()
    assert log.count("scheduler.drain_kv_events") == 4
    first = order(log, "scheduler.advance", "scheduler.drain_kv_events")
    assert first[:2] == ["scheduler.advance", "scheduler.drain_kv_events"]


@pytest.mark.contract("RA-1", "ER-5")
def test_the_round_is_a_short_sequence_without_loops_over_requests() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(EventLoop.round)))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.comprehension)]
    assert len(loops) <= 1
    assert len(inspect.getsource(EventLoop.round).splitlines()) < 120
    branches = [ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.If)]
    assert set(branches) <= {"operation", "facts", "forwarded", "events"}


@pytest.mark.contract("RA-3")
def test_with_every_option_off_a_round_exchanges_ticks_and_stages_nothing() -> None:
    scheduler = ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.rounds(50)
    assert scheduler.heads == []
    assert rig.plane.names() == []
