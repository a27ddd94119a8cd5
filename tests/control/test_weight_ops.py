"""The order of a weight update through the round, over doubles."""

from __future__ import annotations

import pytest
from rig import Rig, ScriptedScheduler, hand_rig, request

from tokenspeed.plane.messages import ControlReply
from tokenspeed.plane.operations import DiskWeights, ReleaseMemoryOp, StartProfileOp, StopProfileOp, UpdateWeightsOp
from tokenspeed.testing import ScriptedPlane

STEPS = ("flush_cache", "load_weights", "commit_weights", "release_memory")


def carried_out(rig: Rig) -> list[str]:
    return [name for name in rig.plane.names() if name in STEPS]


def update(rig: Rig) -> ControlReply:
    rig.put(UpdateWeightsOp(call_id=1, source=DiskWeights(path="there"), version="v2"))
    rig.settle()
    (reply,) = rig.link.replies
    return reply


@pytest.mark.contract("CP-33", "CP-34")
def test_an_update_flushes_loads_commits_and_then_answers() -> None:
    rig = hand_rig(plane=ScriptedPlane())
    assert update(rig).success
    assert carried_out(rig) == ["flush_cache", "load_weights", "commit_weights"]
    assert rig.loop.control_ops.state.version == "v2"


@pytest.mark.contract("CP-32")
def test_nothing_is_loaded_after_a_refused_flush() -> None:
    rig = hand_rig(plane=ScriptedPlane(), scheduler=ScriptedScheduler(clears=[False]))
    reply = update(rig)
    assert not reply.success
    assert "nothing was loaded" in reply.message
    assert carried_out(rig) == []


@pytest.mark.contract("CP-33", "CP-36")
def test_a_failed_load_is_dropped_and_stamps_no_version() -> None:
    rig = hand_rig(plane=ScriptedPlane(refusals={"load_weights": "tensor x has another shape"}))
    reply = update(rig)
    assert (reply.success, reply.message) == (False, "tensor x has another shape")
    assert carried_out(rig) == ["flush_cache", "load_weights", "commit_weights"]
    assert rig.loop.control_ops.state.version == "default"


@pytest.mark.contract("CP-7")
def test_a_release_that_the_device_refuses_leaves_the_engine_serving() -> None:
    rig = hand_rig(plane=ScriptedPlane(refusals={"release_memory": "not on this device"}))
    rig.put(ReleaseMemoryOp(call_id=1), request("a", 5, max_new=3))
    rig.settle()
    assert [reply.success for reply in rig.link.replies] == [False]
    assert len(rig.link.tokens("a")) == 3


@pytest.mark.contract("KM-44", "KM-46")
def test_a_recording_changes_no_plan_and_refuses_what_it_cannot_hold() -> None:
    plain, recorded = hand_rig(), hand_rig()
    recorded.put(
        StartProfileOp(call_id=1, path="p", wants=("GPU",)),
        StartProfileOp(call_id=2, path="p", steps=2, skip=1),
    )
    for rig in (plain, recorded):
        rig.put(request("a", 40, max_new=6))
        rig.settle()
    recorded.put(StopProfileOp(call_id=3))
    recorded.settle()
    assert [(reply.call_id, reply.success) for reply in recorded.link.replies][:2] == [(1, False), (2, True)]
    assert recorded.link.tokens("a") == plain.link.tokens("a")
    assert [plan.batch is None for plan in recorded.plane.plans] == [plan.batch is None for plan in plain.plane.plans]
    names = [name for name in recorded.plane.names() if name in ("execute", "start_profile", "stop_profile")]
    begin = names.index("start_profile")
    assert names[:begin].count("execute") == 1
    assert names[begin : names.index("stop_profile")].count("execute") == 2
