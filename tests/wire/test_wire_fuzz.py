"""Random and mutated frames over the codec and the sockets: nothing of ours breaks, leaks or says it is at fault.

``benchmarks/fuzz_wire.py`` does the same for as long as one likes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import zmq
from fuzz_rig import FuzzedEngine, complaints, fuzzed_engine
from hostile_messages import hostile_frames, hostile_output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_frontend import REGISTRATION, RawEngine, pack

from tokenspeed.plane.messages import ControlReply, EngineEvent, OutputBatch
from tokenspeed.wire.codec import EngineCodec, FrontendCodec
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.layouts import LAYOUTS
from tokenspeed.wire.zmq_frontend import bind_hub

ENGINE, FRONTEND = EngineCodec(), FrontendCodec(layouts=LAYOUTS)
seeds = st.integers(0, (1 << 48) - 1)
FREELY = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(deadline=None, max_examples=1500, suppress_health_check=FREELY)
@given(seeds)
def test_whatever_comes_is_read_answered_or_a_wire_fault(seed: int) -> None:
    with contextlib.suppress(WireError):
        arrival = ENGINE.decode(hostile_frames(seed))
        assert arrival.message is not None or arrival.answer is not None
        if arrival.answer is not None:
            ENGINE.encode(arrival.answer)


@settings(deadline=None, max_examples=1000, suppress_health_check=FREELY)
@given(seeds)
def test_whatever_an_engine_sends_is_read_or_a_wire_fault(seed: int) -> None:
    with contextlib.suppress(WireError):
        event = FRONTEND.decode(hostile_output(seed))
        assert isinstance(event, OutputBatch | ControlReply)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_bytes_are_a_wire_fault_at_most(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        ENGINE.decode(frames)


@pytest.fixture(scope="module")
def tormented() -> Iterator[FuzzedEngine]:
    with fuzzed_engine() as engine:
        yield engine


@settings(deadline=None, max_examples=60, suppress_health_check=FREELY)
@given(st.lists(seeds, min_size=1, max_size=30))
def test_an_engine_serves_after_any_messages_and_holds_nothing(tormented: FuzzedEngine, told: list[int]) -> None:
    tormented.torment(told)


@settings(deadline=None, max_examples=15, suppress_health_check=FREELY)
@given(st.lists(seeds, min_size=1, max_size=20))
def test_a_hub_outlives_any_greeting_and_any_output(told: list[int]) -> None:
    context = zmq.Context()
    hub = bind_hub(engines=1)
    engine = RawEngine(context, hub.address)
    stranger = RawEngine(context, hub.address, index=9)
    come: list[EngineEvent] = []
    last = threading.Event()

    def hear(event: EngineEvent) -> None:
        come.append(event)
        if isinstance(event, ControlReply) and event.call_id == -5:
            last.set()

    try:
        with complaints() as found:
            engine.register(pack(REGISTRATION))
            (link,) = hub.wait_for_engines(5.0)
            link.subscribe(hear)
            for seed in told:
                stranger.greeter.send_multipart(hostile_frames(seed))
                engine.greeter.send(hostile_output(seed))
                engine.send(hostile_output(seed))
                engine.send(
                    ["ControlReplySlim", seed, True, "", 0]
                )  # so that no three unreadable ones follow each other
            engine.send(["ControlReplySlim", -5, True, "", 0])
            assert last.wait(10.0), come[-3:]
            assert found.found == []
    finally:
        hub.close()
        engine.close()
        stranger.close()
        context.destroy(linger=0)
