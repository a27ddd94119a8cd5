"""Members of one replica together, each a whole control plane: who speaks, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs
import pytest
from rig import Rig, hand_rig, request
from source_tree import ROOT

from tokenspeed.control.gate import DpStep
from tokenspeed.plane.messages import AbortRequest, Finish, FrontendMessage, LoadReport, PauseMode, PauseOp
from tokenspeed.plane.operations import DiskWeights, UpdateWeightsOp
from tokenspeed.plane.ports import Mesh
from tokenspeed.plane.results import ForwardResult
from tokenspeed.testing import ScriptedPlane, memory_mesh

PATIENCE_S = 20.0


def together(members: tuple[Rig, ...], act: Callable[[Rig], None]) -> None:
    """`act` on every member, each on a thread of its own, as their collectives need."""
    threads = [threading.Thread(target=act, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def replica(size: int, **parts: object) -> tuple[Rig, ...]:
    return tuple(hand_rig(mesh=mesh, **parts) for mesh in memory_mesh(size))


@pytest.mark.contract("FW-4", "FW-34", "OL-13")
def test_the_first_member_has_the_frontends_wire_and_speaks_for_all() -> None:
    members = replica(3)
    members[0].put(request("a", 5, max_new=6))
    members[1].put(request("b", 5, max_new=6))  # not a wire that anything comes by

    def serve(member: Rig) -> None:
        member.rounds(12)
        member.clock.advance(5.0)
        member.rounds(2)

    together(members, serve)
    first, *others = members
    assert (len(first.link.tokens("a")), first.link.finish("b")) == (6, None)
    reports = [batch.load for batch in first.link.sent]
    assert all(isinstance(report, LoadReport) for report in reports)
    for other in others:
        assert (other.link.log, len(other.link.inbox)) == ([], int(other is others[0]))
        dispatched = [plan.batch.rows.tolist() for plan in other.plane.plans if plan.batch]
        assert dispatched == [plan.batch.rows.tolist() for plan in first.plane.plans if plan.batch] != []


@pytest.mark.contract("FW-6")
@pytest.mark.parametrize("how", ["the frontend goes", "asked to stop"])
def test_members_end_after_the_same_round_whether_the_frontend_goes_or_a_stop_is_asked(how: str) -> None:
    members = replica(4)
    members[0].put(request("a", 5, max_new=200))
    took = dict[int, int]()

    def serve(member: Rig) -> None:
        while not member.loop.state.stopped:
            if member is members[0] and took.get(id(member)) == 7:
                if how == "the frontend goes":
                    member.link.close()
                else:
                    member.loop.request_stop()
            took[id(member)] = took.get(id(member), 0) + 1
            member.loop.round()

    together(members, serve)
    assert list(took.values()) == [8] * 4


@attrs.define(eq=False)
class AskedPlane(ScriptedPlane):
    """Remembers what its commits of weights were told."""

    accepted: list[bool] = attrs.field(factory=list)

    def commit_weights(self, accept: bool) -> str:
        self.accepted.append(accept)
        return super().commit_weights(accept)


@pytest.mark.contract("CP-33", "CP-34", "CP-36")
@pytest.mark.parametrize("refusing", [None, 0, 1])
def test_weights_that_one_member_cannot_load_are_dropped_by_all_before_the_answer(refusing: int | None) -> None:
    text = "tensor x has another shape"
    members = tuple(
        hand_rig(mesh=mesh, plane=AskedPlane(refusals={"load_weights": text} if at == refusing else {}))
        for at, mesh in enumerate(memory_mesh(2))
    )
    members[0].put(UpdateWeightsOp(call_id=1, source=DiskWeights(path="there"), version="v2"))
    together(members, lambda member: member.rounds(6))
    (reply,) = members[0].link.replies
    assert (reply.success, reply.message) == ((True, "") if refusing is None else (False, text))
    for member in members:
        assert [name for name in member.plane.names() if name.endswith("_weights")] == [
            "load_weights",
            "commit_weights",
        ]
        assert isinstance(member.plane, AskedPlane)
        assert member.plane.accepted == [refusing is None]
        assert member.loop.control_ops.state.version == ("v2" if refusing is None else "default")
        assert not member.loop.control_ops.holds_back


@attrs.define(eq=False)
class NotedEplb:
    """`Eplb` that keeps what it is told."""

    noted: list[bool] = attrs.field(factory=list)

    def note(self, *, forwarded: bool) -> None:
        self.noted.append(forwarded)


@pytest.mark.contract("CP-6", "CP-22", "CG-10", "RA-18", "RA-44", "RA-45")
@pytest.mark.parametrize("state", ["serving", "frozen", "drained while the other drains"])
def test_an_idle_forward_counts_as_one_so_that_counters_of_all_ranks_agree(state: str) -> None:
    ranks = [hand_rig(eplb=NotedEplb(), overlap=False) for _ in range(2)]
    ranks = [
        attrs.evolve(rig, loop=attrs.evolve(rig.loop, dp_step=DpStep(mesh=mesh)))
        for rig, mesh in zip(ranks, memory_mesh(2), strict=True)
    ]
    ranks[0].put(request("a", 5, max_new=6))
    if state == "frozen":
        ranks[1].put(PauseOp(call_id=1, mode=PauseMode.KEEP), request("held back", 5))
    elif state != "serving":
        for rig in ranks:
            rig.put(PauseOp(call_id=1, mode=PauseMode.WAIT))
    together(tuple(ranks), lambda rig: rig.rounds(20))
    assert len(ranks[0].link.tokens("a")) == 6
    busy, idle = (rig.plane.names() for rig in ranks)
    assert (busy.count("idle_forward"), idle.count("idle_forward")) == (0, busy.count("execute"))
    assert busy.count("note_forwarded") == idle.count("note_forwarded") == busy.count("execute")
    noted = [rig.loop.eplb.noted for rig in ranks if isinstance(rig.loop.eplb, NotedEplb)]
    assert noted[0] == noted[1]
    assert sum(noted[0]) == busy.count("execute")


@attrs.frozen
class LastStage:
    """`Pipeline` over a mesh whose last member is the last stage."""

    mesh: Mesh

    def adopt_last_stage(self, result: ForwardResult) -> ForwardResult:
        return self.mesh.gather(result)[-1]


@pytest.mark.contract("OL-18")
def test_every_stage_ends_a_request_by_the_last_stages_result_in_the_same_round() -> None:
    stages = memory_mesh(2)
    endless = ScriptedPlane(answer=lambda batch: ForwardResult(tokens=[7] * int(batch.samples.sum())))
    members = (hand_rig(plane=endless, pipeline=LastStage(stages[0])), hand_rig(pipeline=LastStage(stages[1])))
    ended: list[list[int]] = [[], []]

    def serve(member: Rig) -> None:
        asked: tuple[FrontendMessage, ...] = (request("a", 5, max_new=4), request("b", 9, max_new=9))
        for number in range(20):
            member.put(*(asked if number == 0 else [AbortRequest(rids=("b",))] if number == 8 else []))
            member.loop.round()
            ended[members.index(member)].append(member.loop.table.live)

    together(members, serve)
    assert members[0].link.tokens("a") == members[1].link.tokens("a") != [7] * 4
    assert [member.link.finish("a") for member in members] == [(Finish.LENGTH, 0, "")] * 2
    assert ended[0] == ended[1]


@pytest.mark.contract("FW-15")
def test_a_retry_under_a_new_id_is_admitted_in_the_round_of_the_abort() -> None:
    rig = hand_rig()
    rig.put(request("first", 5, max_new=50))
    rig.rounds(4)
    rig.put(AbortRequest(rids=("first",)), request("retry", 5, max_new=6))
    rig.loop.round()
    assert rig.loop.table.row_of("retry") is not None
    rig.settle()
    assert len(rig.link.tokens("retry")) == 6
    assert rig.link.finish("first") is not None
    told = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    assert "Each new request takes a new id, a retry after an abort too" in told
