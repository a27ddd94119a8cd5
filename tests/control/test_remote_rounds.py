"""Remote streams in the round: dispatched with or without a batch, and what a client hears of a failed transfer."""

from __future__ import annotations

import attrs
import pytest
from rig import Rig, hand_rig, request

from tokenspeed.plane.results import SchedulerEvent, TransferDone
from tokenspeed.testing import ScriptedPlane


@attrs.define(eq=False)
class HandPeer:
    """A peer whose transfers end when the test says so; meets `control.pd.Pd`."""

    role: str
    begun: list[int] = attrs.field(factory=list)
    events: list[SchedulerEvent] = attrs.field(factory=list)

    def started(self, rows: tuple[int, ...]) -> None:
        self.begun.extend(rows)

    def poll(self) -> tuple[SchedulerEvent, ...]:
        events = tuple(self.events)
        self.events.clear()
        return events


def peer_rig(role: str) -> tuple[Rig, ScriptedPlane, HandPeer]:
    plane, peer = ScriptedPlane(), HandPeer(role)
    return hand_rig(plane=plane, pd=peer, overlap=False), plane, peer


@pytest.mark.contract("SP-28", "SP-31")
def test_a_decode_nodes_stream_goes_out_in_one_execute_without_a_batch() -> None:
    rig, plane, peer = peer_rig("decode")
    rig.put(request("a", 40))
    rig.loop.round()
    (plan,) = plane.plans
    assert plan.batch is None
    assert [stream.rid for stream in plan.remote_prefill] == ["a"]
    assert peer.begun == [plan.remote_prefill[0].row]
    # Nothing to do until the transfer has ended: the loop may sleep.
    assert not any(rig.loop.round() for _ in range(3))
    assert len(plane.plans) == 1


@pytest.mark.contract("SP-22", "PD-13")
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_failed_transfer_ends_the_request_for_its_client_and_gives_its_pages_back(role: str) -> None:
    rig, plane, peer = peer_rig(role)
    rig.put(request("a", 40))
    rig.rounds(4)
    streams = [stream for plan in plane.plans for stream in (*plan.remote_prefill, *plan.remote_decode)]
    assert [stream.rid for stream in streams] == ["a"]
    assert rig.link.finish("a") is None
    peer.events.append(TransferDone(row=streams[0].row, ok=False))
    rig.rounds(2)
    finish = rig.link.finish("a")
    assert finish is not None
    assert "prompt" in finish[2]
    assert rig.loop.scheduler.sizes().held == 0
    assert rig.loop.scheduler.active_lcm_blocks() == 0
    assert rig.loop.table.live == 0


@pytest.mark.contract("SP-29", "SP-34")
def test_a_prefill_nodes_stream_goes_out_with_the_plan_after_the_last_chunks_result() -> None:
    rig, plane, _ = peer_rig("prefill")
    rig.put(request("a", 40))
    rig.rounds(5)
    chunks, (last,) = plane.plans[:2], plane.plans[2:]
    assert [plan.batch.num_tokens for plan in chunks if plan.batch is not None] == [32, 8]
    assert all(plan.remote_decode == () for plan in chunks)
    assert last.batch is None
    assert [stream.rid for stream in last.remote_decode] == ["a"]
