"""When a request's waiting begins and ends for the metrics, what a preemption changes, and what a round records."""

from __future__ import annotations

import attrs
import pytest
from rig import SPECS, Rig, ScriptedScheduler, hand_rig, one_row_batch, request
from test_remote_rounds import HandPeer

from tokenspeed.control.batch_log import BatchLog
from tokenspeed.plane.messages import AbortRequest, LoadReport
from tokenspeed.plane.plan import ExecutionPlan
from tokenspeed.plane.results import SchedulerEvent, Sizes, TransferDone
from tokenspeed.telemetry.meters import NullMeter
from tokenspeed.testing import ScriptedPlane


@attrs.frozen(eq=False)
class Noted(NullMeter):
    """A meter that keeps what it is told."""

    queued_s: list[float] = attrs.field(factory=list)
    preemptions: list[int] = attrs.field(factory=list)
    rounds: list[tuple[Sizes, LoadReport, int, int]] = attrs.field(factory=list)
    reports: list[LoadReport] = attrs.field(factory=list)

    def queued(self, seconds: float) -> None:
        self.queued_s.append(seconds)

    def preempted(self, count: int) -> None:
        self.preemptions.append(count)

    def round(self, *, sizes: Sizes, load: LoadReport, tokens: int, prompt_tokens: int) -> None:
        self.rounds.append((sizes, load, tokens, prompt_tokens))

    def reported(self, load: LoadReport) -> None:
        self.reports.append(load)


@attrs.frozen(kw_only=True, eq=False)
class NotedLog(BatchLog):
    """A batch log that keeps what it is told."""

    records: list[tuple[LoadReport, int, int]] = attrs.field(factory=list)

    def record(self, load: LoadReport, *, decode_tokens: int, prompt_tokens: int, preempted: int, now_s: float) -> None:
        self.records.append((load, decode_tokens, prompt_tokens))


@pytest.mark.contract("KM-11")
def test_the_queue_time_runs_from_the_submission_to_the_first_dispatched_forward_and_is_told_once() -> None:
    meter, scheduler = Noted(), ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), meter=meter)
    assert rig.clock.now_s() == 1.0
    rig.put(request("a", 3))
    rig.loop.round()
    rig.clock.advance(2.5)
    scheduler.plans.append(ExecutionPlan(round_id=2, batch=one_row_batch(0, 0, [1, 2, 3]), seated=(0,)))
    rig.loop.round()
    assert meter.queued_s == [2.5]
    rig.clock.advance(1.0)
    scheduler.plans.append(ExecutionPlan(round_id=3, batch=one_row_batch(0, 0, [4], start=3)))
    rig.loop.round()
    assert meter.queued_s == [2.5]


@pytest.mark.contract("KM-11")
def test_a_seat_without_a_forward_does_not_end_the_wait() -> None:
    meter, scheduler = Noted(), ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), meter=meter)
    rig.put(request("a", 3), request("b", 3))
    rig.loop.round()
    rig.clock.advance(1.0)
    # Both have a seat, and one of them lacks blocks for its first chunk.
    scheduler.plans.append(ExecutionPlan(round_id=2, batch=one_row_batch(0, 0, [1, 2, 3]), seated=(0, 1)))
    rig.loop.round()
    assert meter.queued_s == [1.0]
    rig.clock.advance(1.5)
    scheduler.plans.append(ExecutionPlan(round_id=3, batch=one_row_batch(1, 1, [1, 2, 3])))
    rig.loop.round()
    assert meter.queued_s == [1.0, 2.5]


@attrs.define(eq=False)
class Delivering(HandPeer):
    """A prefill node's KV arrives, and its first token with it."""

    rig: Rig | None = None

    def deliver(self, row: int, token: int) -> None:
        assert self.rig is not None
        table = self.rig.loop.table
        table.tokens.seated[int(table.schedule.slot[row]), int(table.tokens.known[row])] = token
        table.tokens.known[row] += 1
        arrived: SchedulerEvent = TransferDone(row=row, ok=True)
        self.events.append(arrived)


@pytest.mark.contract("KM-11")
def test_on_a_decode_node_the_wait_ends_with_the_first_forward_behind_the_transfer() -> None:
    meter, peer = Noted(), Delivering("decode")
    rig = hand_rig(plane=ScriptedPlane(), pd=peer, meter=meter, overlap=False)
    peer.rig = rig
    rig.put(request("a", 40, max_new=4))
    rig.rounds(2)
    (row,) = peer.begun
    rig.clock.advance(3.0)
    peer.deliver(row, 7)
    rig.rounds(2)
    assert meter.queued_s == [3.0]
    rig.settle()
    assert meter.queued_s == [3.0]


@pytest.mark.contract("KM-12", "KM-10", "SP-47")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_is_retracted_twice_waited_and_was_submitted_once(overlap: bool) -> None:
    meter = Noted()
    rig = hand_rig(specs=attrs.evolve(SPECS, num_pages=17), overlap=overlap, meter=meter)
    rig.put(*(request(f"r{at}", 10 + at, max_new=220) for at in range(4)))
    most = 0
    for _ in range(2000):
        if not rig.loop.round():
            break
        live = list(rig.loop.table.by_rid.values())
        most = max([most, *rig.loop.table.stats.preemptions[live].tolist()])
    assert all(len(rig.link.tokens(f"r{at}")) == 220 for at in range(4))
    assert most >= 2
    assert sum(meter.preemptions) > most
    assert len(meter.queued_s) == 4
    assert rig.loop.state.funnelled == 4


@pytest.mark.contract("KM-10")
def test_a_plan_with_two_victims_raises_the_count_of_preemptions_by_two_in_its_round() -> None:
    meter, scheduler = Noted(), ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), meter=meter)
    rig.put(request("a", 3), request("b", 3), request("c", 3))
    rig.loop.round()
    scheduler.plans.append(ExecutionPlan(round_id=2, batch=one_row_batch(0, 0, [1, 2, 3]), preempted=(1, 2)))
    assert meter.preemptions == []
    rig.loop.round()
    assert meter.preemptions == [2]
    assert rig.loop.table.stats.preemptions[:3].tolist() == [0, 1, 1]


@pytest.mark.contract("KM-13")
def test_a_request_that_ends_before_its_first_forward_is_not_observed_and_leaves_no_stamp_to_the_next() -> None:
    meter, scheduler = Noted(), ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), meter=meter)
    rig.put(request("a", 3))
    rig.loop.round()
    row = rig.loop.table.by_rid["a"]
    rig.put(AbortRequest(rids=("a",)))
    scheduler.plans.append(ExecutionPlan(round_id=2, retired=(row,)))
    rig.clock.advance(5.0)
    rig.rounds(2)
    assert meter.queued_s == []
    assert rig.loop.table.by_rid == {}
    rig.put(request("b", 3))
    rig.loop.round()
    assert rig.loop.table.by_rid == {"b": row}
    rig.clock.advance(0.5)
    scheduler.plans.append(ExecutionPlan(round_id=4, batch=one_row_batch(row, 0, [1, 2, 3]), seated=(row,)))
    rig.loop.round()
    assert meter.queued_s == [0.5]


@pytest.mark.contract("KM-4")
def test_each_forward_is_recorded_once_on_the_state_before_its_dispatch_for_metrics_and_log_alike() -> None:
    meter, log = Noted(), NotedLog()
    rig = hand_rig(meter=meter, overlap=False)
    loop = attrs.evolve(rig.loop, batch_log=log)
    rig.put(request("a", 40, max_new=3), request("b", 10, max_new=2), request("c", 5, max_new=1))
    for _ in range(12):
        before, forwards = len(meter.rounds), rig.plane.names().count("execute")
        loop.round()
        assert len(meter.rounds) - before == rig.plane.names().count("execute") - forwards
    plans = [plan.batch for plan in rig.plane.plans if plan.batch is not None]
    assert [tokens for _, _, tokens, _ in meter.rounds] == [batch.num_tokens for batch in plans]
    assert log.records == [(load, tokens - prompt, prompt) for _, load, tokens, prompt in meter.rounds]
    # The request of one token is over when its round ends: the record still knows it, the report does not.
    assert [load.running for _, load, _, _ in meter.rounds][:2] == [3, 2]
    assert meter.reports[0].running == 2
    assert all(load.running == sizes.running for sizes, load, _, _ in meter.rounds)


@attrs.define(eq=False)
class Walked(ScriptedScheduler):
    """Something runs; counts how often its block tables are walked."""

    walks: int = 0
    counts: Sizes = attrs.field(factory=lambda: Sizes(decoding=1))

    def active_lcm_blocks(self) -> int:
        self.walks += 1
        return self.walks

    def empty_lcm_blocks(self) -> int:
        return 0


@pytest.mark.contract("KM-20")
def test_report_metrics_and_log_share_one_walk_over_the_block_tables_in_100_ms() -> None:
    plans = [ExecutionPlan(round_id=at, batch=one_row_batch(0, 0, [1], start=at)) for at in range(200)]
    meter, log, scheduler = Noted(), NotedLog(), Walked(plans=plans)
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane(), meter=meter, overlap=False)
    loop = attrs.evolve(rig.loop, batch_log=log)
    rig.put(request("a", 1, max_new=250))
    for _ in range(100):
        loop.round()
        rig.clock.advance(0.001)
    assert scheduler.walks == 1
    rig.clock.advance(0.001)
    loop.round()
    assert scheduler.walks == 2
    shown = [sent.load.active_blocks for sent in rig.link.sent if sent.load is not None]
    assert shown == [1] * 100 + [2]
    assert [load.active_blocks for _, load, _, _ in meter.rounds] == shown
    assert [load.active_blocks for load, _, _ in log.records] == shown
