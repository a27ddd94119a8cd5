"""Who owns what: threads, modules alone, the members of a replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import attrs
import numpy as np
import pytest
from rig import ScriptedScheduler, hand_rig, one_row_batch, request

from tokenspeed.control.cache_ops import CacheOps
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.gate import DpStep, Gate
from tokenspeed.control.grammar import Settled
from tokenspeed.control.relay import Relay
from tokenspeed.control.request_stats import RequestStats
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.grammar import GrammarPlan, GrammarRow
from tokenspeed.plane.messages import AbortRequest, ResumeOp
from tokenspeed.plane.plan import (
    CacheOp,
    ExecutionPlan,
    ForwardBatch,
    GroupBlocks,
    HistorySeed,
    LoadBackOp,
    RestoreBatch,
    RestoreOp,
    Sampling,
    SnapshotBatch,
    SnapshotOp,
    WriteBackOp,
    int32,
)
from tokenspeed.plane.results import CacheAcks, ForwardResult
from tokenspeed.plane.table import request_table
from tokenspeed.settings.model import LogSettings, Settings
from tokenspeed.telemetry.meters import NullMeter
from tokenspeed.testing import ScriptedPlane, memory_mesh

T = TypeVar("T")


def on_members(size: int, work: Callable[[int], T]) -> list[T]:
    """Run `work(rank)` on a thread for each rank; their results by rank."""
    found: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failures:
        raise failures[0]
    return [found[rank] for rank in range(size)]


@pytest.mark.contract("RA-8", "CG-1")
def test_every_member_sees_the_owners_messages_and_its_stop() -> None:
    mesh = memory_mesh(3)
    owner = (AbortRequest(rids=("a",)), ResumeOp(call_id=1))
    seen = on_members(3, lambda rank: Relay(mesh=mesh[rank]).share(owner if rank == 0 else (), stop=rank == 0))
    assert [inbox.messages for inbox in seen] == [owner] * 3
    assert [inbox.stop for inbox in seen] == [True] * 3
    idle = on_members(3, lambda rank: Relay(mesh=mesh[rank]).share((), stop=rank == 2))
    assert [inbox.stop for inbox in idle] == [False] * 3


def test_the_gate_passes_an_operation_only_when_every_member_has_it() -> None:
    mesh = memory_mesh(2)
    for waiting, passes in (((True, False), False), ((True, True), True), ((False, False), False)):
        got = on_members(2, lambda rank, at=waiting: Gate(mesh=mesh[rank]).passes(waiting=at[rank]))
        assert got == [passes] * 2


@pytest.mark.contract("SP-27")
def test_a_member_without_tokens_joins_a_peers_forward_and_tokens_alone_decide() -> None:
    mesh = memory_mesh(2)
    for tokens, due in (((0, 5), [True, False]), ((0, 0), [False, False]), ((3, 5), [False, False])):
        got = on_members(2, lambda rank, at=tokens: DpStep(mesh=mesh[rank]).idle_forward_due(tokens=at[rank]))
        assert got == due


TAIL = (GroupBlocks(blocks=(1,)),)
OPEN: dict[str, tuple[CacheOp, ...]] = {
    "write_backs": tuple(WriteBackOp(op_id=i, group=0, device_blocks=(i,), host_blocks=(i,)) for i in (1, 2)),
    "load_backs": tuple(LoadBackOp(op_id=i, group=0, device_blocks=(i,), host_blocks=(i,)) for i in (1, 2)),
    "snapshots": (SnapshotBatch(ops=tuple(SnapshotOp(op_id=i, slot=i, tail=TAIL, image=i) for i in (1, 2))),),
    "restores": (RestoreBatch(ops=tuple(RestoreOp(op_id=i, slot=i, pages=(), tail=TAIL, image=i) for i in (1, 2))),),
}


@pytest.mark.contract("PT-21", "SP-19", "CT-8")
@pytest.mark.parametrize("kind", OPEN)
def test_an_acknowledgment_counts_only_when_every_member_has_it(kind: str) -> None:
    mesh = memory_mesh(3)
    plan = ExecutionPlan(round_id=1, cache=OPEN[kind])

    def acks(*ids: int) -> CacheAcks:
        return CacheAcks(**{kind: ids})

    # The second member has the one at once, and the other five polls after its peers.
    late = [acks(2), *[acks()] * 4, acks(1), acks()]
    scripts = {0: [acks(1, 2)], 1: late, 2: [acks(1), acks(2)]}

    def work(rank: int) -> list[tuple[CacheAcks, int]]:
        plane = ScriptedPlane()
        plane.acks.extend(scripts[rank])
        ops = CacheOps(mesh=mesh[rank])
        ops.note(plan)
        return [(ops.poll(plane), ops.open) for _ in range(7)]

    nothing = (acks(), 1)
    assert (
        on_members(3, work)
        == [
            [(acks(), 2), (acks(2), 1), nothing, nothing, nothing, (acks(1), 0), (acks(), 0)],
        ]
        * 3
    )


def test_more_acknowledgments_than_operations_is_a_broken_invariant() -> None:
    plane = ScriptedPlane()
    plane.acks.append(CacheAcks(write_backs=(1, 2)))
    ops = CacheOps(mesh=memory_mesh(1)[0])
    ops.note(ExecutionPlan(round_id=1, cache=(WriteBackOp(op_id=1, group=0, device_blocks=(1,), host_blocks=(1,)),)))
    with pytest.raises(InvariantBroken, match="more cache acknowledgments"):
        ops.poll(plane)


@attrs.frozen(eq=False)
class OneThread:
    """Passes everything on, but only on the thread that made it."""

    target: object
    owner: int = attrs.field(factory=threading.get_ident)

    def __getattr__(self, name: str) -> object:
        if threading.get_ident() != self.owner:
            raise InvariantBroken("touched from another thread", name=name)
        return getattr(self.target, name)


@pytest.mark.contract("PT-3")
def test_scheduler_table_and_mesh_are_touched_by_the_control_thread_alone() -> None:
    from test_with_forward_thread import running

    with running() as engine:
        engine.put(*(request(f"warm{i}", 3, max_new=1) for i in range(2)))
        assert engine.link.wait(lambda: engine.link.finish("warm1"))
        engine.rig.loop.request_stop()
        engine.thread.join(10)
        done: list[BaseException | None] = []

        def guarded() -> None:
            loop: EventLoop = attrs.evolve(
                engine.rig.loop,
                scheduler=OneThread(engine.rig.loop.scheduler),
                table=OneThread(engine.rig.loop.table),
            )
            loop.state.stop_asked = loop.state.stopped = False
            try:
                for _ in range(400):
                    loop.round()
                done.append(None)
            except BaseException as error:
                done.append(error)

        engine.put(*(request(f"r{i}", 5 + i, max_new=6) for i in range(20)))
        thread = threading.Thread(target=guarded, name="ts-control")
        thread.start()
        thread.join(20)
        assert done == [None]
        assert all(engine.link.finish(f"r{i}") for i in range(20))


@pytest.mark.contract("PT-28")
def test_round_lines_come_from_the_batch_log_and_request_lines_from_request_stats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rig = hand_rig(settings=Settings(log=LogSettings(requests=True, interval_s=1.0)))
    rig.put(request("a", 5, max_new=9), request("b", 40, max_new=3))
    for _ in range(30):
        rig.clock.advance(0.3)
        rig.loop.round()
    names = {record.name for record in caplog.records if record.levelno == logging.INFO}
    assert names == {"tokenspeed.batch", "tokenspeed.request"}
    lines = [record.getMessage() for record in caplog.records if record.name == "tokenspeed.request"]
    assert sorted(line.split(":")[0] for line in lines) == ["a", "b"]
    assert all("length" in line for line in lines)
    quiet = len(caplog.records)
    rig.clock.advance(100)
    rig.rounds(20)
    assert len(caplog.records) == quiet


@attrs.frozen(eq=False)
class Seeds:
    def seeds(self, plan: ExecutionPlan) -> tuple[HistorySeed, ...]:
        return (HistorySeed(slot=0, prefix_length=3, first=0, tokens=int32([1, 2, 3])),)


HELD = GrammarPlan(rows=(GrammarRow(index=0, handle=7, produced=0, known=()),))


@attrs.frozen(eq=False)
class Matchers:
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

    def needs_commit_first(self, batch: ForwardBatch) -> bool:
        return False

    def plan(self, plan: ExecutionPlan) -> GrammarPlan:
        return HELD

    def adopt(self, batch: ForwardBatch, result: ForwardResult) -> ForwardResult:
        return result

    def release(self, rows: tuple[int, ...]) -> None:
        return None


@pytest.mark.contract("RA-20", "DP-49")
def test_a_dispatch_carries_logprobs_seeds_and_grammar_advances_of_its_batch() -> None:
    scheduler = ScriptedScheduler(plans=[ExecutionPlan(round_id=1, batch=one_row_batch(0, 0, [1, 2, 3]), seated=(0,))])
    plane = ScriptedPlane()
    rig = hand_rig(scheduler=scheduler, plane=plane, history=Seeds(), grammar=Matchers())
    rig.put(request("a", 3, return_logprob=True, top_logprobs=1))
    rig.rounds(1)
    dispatch = plane.dispatches[0]
    assert dispatch.logprobs.sampled == ((0, 1),)
    assert dispatch.histories[0].tokens.tolist() == [1, 2, 3]
    assert dispatch.grammars == HELD
    assert [(seat.slot, seat.rid, seat.prompt_len) for seat in dispatch.seats] == [(0, "a", 3)]


def test_a_first_token_is_stamped_when_it_came_although_batches_share_their_rows() -> None:
    table = request_table(slots=4, max_len=64)
    stats = RequestStats(table=table, meter=NullMeter())
    for i in range(2):
        table.seat(table.add(rid=f"r{i}", tokens=int32([1, 2]), max_new=9, sampling=Sampling()), i)
    batch = one_row_batch(table.by_rid["r0"], 0, [1, 2])
    stats.committed(batch, now_s=1.0)
    table.tokens.known[batch.rows] += 1
    stats.committed(batch, now_s=2.0)
    stats.committed(batch, now_s=3.0)
    both = batch._replace(rows=int32([table.by_rid["r0"], table.by_rid["r1"]]), samples=np.array([True, True]))
    table.tokens.known[table.by_rid["r1"]] += 1
    stats.committed(both, now_s=4.0)
    stats.committed(both, now_s=5.0)
    assert table.stats.first_token_s[both.rows].tolist() == [2.0, 4.0]


def test_a_request_that_ends_before_it_ran_has_its_line_and_its_release_before_its_row_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tokenspeed.request")
    rig = hand_rig(settings=Settings(log=LogSettings(requests=True)))
    rig.put(request("gone", 5), AbortRequest(rids=("gone",)))
    rig.loop.round()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["gone"]
    assert rig.plane.names().count("release") == 1
    assert rig.loop.table.live == 0
