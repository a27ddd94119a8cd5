"""A burst of messages reaches the scheduler in slices, whole and in order."""

from __future__ import annotations

import itertools

import attrs
import pytest
from rig import hand_rig, request

from tokenspeed.plane.messages import AbortRequest, Finish, FrontendMessage
from tokenspeed.plane.ports import Wakeup
from tokenspeed.testing import HandWakeup, RecordingLink
from tokenspeed.wire.traffic import RECEIVED_AT_ONCE, Traffic


@attrs.define(eq=False)
class TrafficLink(RecordingLink):
    """What arrives comes through the queue of the transports."""

    traffic: Traffic = attrs.field(kw_only=True)

    def receive(self) -> tuple[FrontendMessage, ...]:
        return self.traffic.received()


def traffic(wakeup: Wakeup) -> Traffic:
    return Traffic(wakeup=wakeup, max_requests=1000)


@pytest.mark.contract("IS-1")
def test_a_burst_is_received_in_slices_whole_and_in_order() -> None:
    wakeup = HandWakeup()
    queue = traffic(wakeup)
    burst = [request(f"r{i}", [1, 2]) for i in range(3 * RECEIVED_AT_ONCE + 1)]
    assert all(queue.arrive(message) for message in burst)
    slices = []
    while wakeup.wait(0.0):
        slices.append(queue.received())
    assert [len(part) for part in slices] == [RECEIVED_AT_ONCE] * 3 + [1]
    assert [message for part in slices for message in part] == burst
    assert queue.received() == ()


@pytest.mark.contract("IS-1", "RA-7")
def test_no_round_submits_more_than_a_slice_while_others_decode_and_the_loop_does_not_sleep_before_the_last() -> None:
    rig = hand_rig()
    queue = traffic(rig.wakeup)
    link = TrafficLink(traffic=queue)
    loop = attrs.evolve(rig.loop, frontend=link, state=rig.loop.state)
    queue.arrive(request("running", [1, 2, 3], max_new=40))
    for _ in range(3):
        loop.round()
    count = RECEIVED_AT_ONCE + 8
    for i in range(count):
        queue.arrive(request(f"r{i}", [1, 2, i % 7 + 1], max_new=1))
    queue.arrive(AbortRequest(rids=("r1", f"r{count - 1}")))
    before = len(link.tokens("running"))
    funnelled = [loop.state.funnelled]
    for _ in range(2):
        assert rig.wakeup.wait(0.0)
        loop.round()
        funnelled.append(loop.state.funnelled)
    assert [late - early for early, late in itertools.pairwise(funnelled)] == [RECEIVED_AT_ONCE, 8]
    assert len(link.tokens("running")) == before + 2
    assert not rig.wakeup.wait(0.0)
    for _ in range(60):
        loop.round()
    # The abort came behind the last request: it found both, whichever slice they were in.
    ends = [link.finish(f"r{i}") for i in range(count)]
    assert all(end is not None for end in ends)
    assert ends[-1] is not None
    assert ends[-1][0] == Finish.ABORT
