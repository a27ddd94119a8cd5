"""Two members of a replica: one has the frontend's wire, the relay brings its messages to both; the peer's role."""

from __future__ import annotations

import ast
import enum
from pathlib import Path

import attrs
import pytest
from device_doubles import TIMEOUT_S, CountingWakeup, FakeHandle
from rig import hand_rig, request
from test_ownership import on_members

import tokenspeed
from tokenspeed.control.pd import NoPeer
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.executors.futures.executor import FuturesExecutor
from tokenspeed.device.executors.streams import StreamExecutor
from tokenspeed.device.handle import StreamDeviceHandle
from tokenspeed.plane.messages import AbortRequest
from tokenspeed.scheduler.config import Role
from tokenspeed.testing import memory_mesh

ROOMS = Path(tokenspeed.__file__).parent


def attributes(path: Path) -> list[str]:
    return [node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)]


@pytest.mark.contract("PT-29")
def test_both_members_serve_what_reaches_the_first_ones_wire() -> None:
    mesh = memory_mesh(2)
    members = [hand_rig(mesh=mesh[0]), hand_rig(mesh=mesh[1])]
    first, second = members
    first.put(request("a", 5, max_new=6), request("b", 9, max_new=40))

    def rounds(rank: int) -> None:
        member = members[rank]
        for count in range(30):
            if count == 12 and rank == 0:
                first.put(AbortRequest(rids=("b",)))
            member.loop.round()

    on_members(2, rounds)
    assert len(first.link.tokens("a")) == 6
    assert not second.link.inbox  # nothing ever came by this one
    executed = [
        [(plan.round_id, plan.batch.rows.tolist()) for plan in rig.plane.plans if plan.batch] for rig in members
    ]
    assert executed[0] == executed[1] != []


@pytest.mark.contract("PT-29")
def test_the_relay_alone_takes_messages_from_the_wire_and_the_wire_alone_has_sockets() -> None:
    taking = [path.name for path in (ROOMS / "control").glob("*.py") if "receive" in attributes(path)]
    assert taking == ["event_loop.py"]
    loop = ast.parse((ROOMS / "control" / "event_loop.py").read_text("utf-8"))
    shared = [
        ast.unparse(node.args[0])
        for node in ast.walk(loop)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "share"
    ]
    assert shared == ["self.frontend.receive()"]
    importing = {
        path.relative_to(ROOMS).parts[0]
        for path in ROOMS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Import) and any(name.name.split(".")[0] == "zmq" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zmq")
    }
    assert importing <= {"wire", "telemetry"}  # the second publishes metrics to a process of its own


@pytest.mark.contract("PT-15")
def test_a_member_whose_device_hangs_comes_to_every_collective_of_the_round() -> None:
    """Until it has to commit: then it waits for its device, as each member does."""
    mesh, handle = memory_mesh(2), FakeHandle()
    plane = open_data_plane(handle, CountingWakeup())
    try:
        members = [hand_rig(mesh=mesh[0]), hand_rig(mesh=mesh[1], plane=plane)]
        members[0].put(request("a", 5), request("b", 9))
        on_members(2, lambda rank: members[rank].loop.round())  # a member that stays away makes the others raise
        assert handle.entered.wait(TIMEOUT_S)
        assert handle.operations == []
        assert [len(member.loop.state.in_flight) for member in members] == [1, 1]
    finally:
        handle.gate.set()
        plane.close()


@attrs.define(eq=False)
class AskedPeer:
    """`Pd` that counts how often its role is read."""

    inner: NoPeer = attrs.field(factory=NoPeer)
    asked: int = 0

    @property
    def role(self) -> str:
        self.asked += 1
        return self.inner.role

    def started(self, rows: tuple[int, ...]) -> None:
        self.inner.started(rows)

    def poll(self) -> tuple[object, ...]:
        return self.inner.poll()


@pytest.mark.contract("DP-34")
def test_the_role_is_read_off_the_peer_once() -> None:
    peer = AskedPeer()
    rig = hand_rig(pd=peer)
    rig.put(request("a", 5, max_new=6))
    rig.settle()
    assert len(rig.link.tokens("a")) == 6
    assert peer.asked == 1


@pytest.mark.contract("DP-35")
def test_a_role_is_a_value_and_not_a_class() -> None:
    assert issubclass(Role, enum.Enum)
    assert {role.value for role in Role} == {"plain", "prefill", "decode"}
    for kind in (StreamExecutor, FuturesExecutor, StreamDeviceHandle):
        assert kind.__subclasses__() == []
