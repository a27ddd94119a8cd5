"""Our frontend's end against engines that share no code with it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import zmq
from raw_frontend import REGISTRATION, RawEngine, pack, unpack
from wire_samples import request

from tokenspeed.errors import PeerLost
from tokenspeed.plane.messages import (
    AbortRequest,
    ControlReply,
    EngineEvent,
    EngineGone,
    Finish,
    FlushCacheOp,
    OutputBatch,
)
from tokenspeed.wire.zmq_frontend import FrontendHub, bind_hub

ROW = ["BatchTokenIDOutSlim", ["a"], [[4]], [""], [3], [1], [0], [[]], [[]]]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Dial:
    """Makes raw engines and closes them in the end."""

    def __init__(self, context: zmq.Context) -> None:
        self.context = context
        self.engines: list[RawEngine] = []

    def __call__(self, address: str, *, index: int = 0) -> RawEngine:
        self.engines.append(RawEngine(self.context, address, index=index))
        return self.engines[-1]


@pytest.fixture
def dial(context: zmq.Context) -> Iterator[Dial]:
    dial = Dial(context)
    yield dial
    for engine in dial.engines:
        engine.close()


@pytest.fixture
def hub() -> Iterator[FrontendHub]:
    hub = bind_hub(engines=1)
    yield hub
    hub.close()


class Ear:
    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.changed = threading.Condition()

    def __call__(self, event: EngineEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def count(self, count: int) -> list[EngineEvent]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= count, 5.0), self.events
            return self.events


@pytest.mark.contract("FW-2")
def test_an_engine_of_the_older_kind_is_served(hub: FrontendHub, dial: Dial) -> None:
    engine = dial(hub.address)
    engine.register()
    (link,) = hub.wait_for_engines(5.0)
    assert (link.info.max_model_len, link.info.num_blocks, link.info.block_size) == (512, 8, 16)
    ear = Ear()
    link.subscribe(ear)
    link.send(request("a", (1, 2)))
    link.send(AbortRequest(rids=("a",)))
    link.send(FlushCacheOp(call_id=3))
    kind, payload = engine.next_input()
    assert (kind, unpack(payload)[:5]) == (b"\0", ["TokenizedGenerateReqInput", "a", None, None, [1, 2]])
    assert [engine.next_input()[0], engine.next_input()[0]] == [b"\1", b"\2"]
    engine.send(ROW)
    engine.send(["ControlReplySlim", 3, True, "", 0])
    first, second = ear.count(2)
    assert isinstance(first, OutputBatch)
    assert first.output_ids == [[4]]
    assert second == ControlReply(call_id=3, success=True)


def test_a_field_an_older_engine_cannot_take_is_refused_towards_the_client(hub: FrontendHub, dial: Dial) -> None:
    engine = dial(hub.address)
    engine.register()
    (link,) = hub.wait_for_engines(5.0)
    ear = Ear()
    link.subscribe(ear)
    link.send(request("a", cache_salt=b"tenant"))
    (event,) = ear.count(1)
    assert isinstance(event, OutputBatch)
    assert (event.rids, event.finished, event.status) == (["a"], [int(Finish.ABORT)], [400])
    assert "cache_salt" in event.messages[0]


def test_strangers_and_second_greetings_get_no_addresses(
    hub: FrontendHub, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tokenspeed.wire"):
        stranger = dial(hub.address, index=7)
        stranger.hello()
        assert stranger.init(200) is None
        engine = dial(hub.address)
        engine.hello(b"\xc1")
        engine.register()
        hub.wait_for_engines(5.0)
        engine.hello()
        assert engine.init(200) is None
    assert "0700" in caplog.text
    assert "greeted before" in caplog.text


def test_a_registration_that_cannot_be_used_fails_the_wait_with_the_key(hub: FrontendHub, dial: Dial) -> None:
    engine = dial(hub.address)
    engine.register(pack({**REGISTRATION, "dtype": "int3"}))
    with pytest.raises(PeerLost, match="dtype"):
        hub.wait_for_engines(5.0)


def test_engines_that_do_not_come_are_counted(dial: Dial) -> None:
    hub = bind_hub(engines=2)
    dial(hub.address).register()
    with pytest.raises(PeerLost, match="of 2 engines registered"):
        hub.wait_for_engines(0.3)
    hub.close()


def test_closing_the_hub_ends_a_wait(dial: Dial) -> None:
    hub = bind_hub(engines=1)
    errors: list[PeerLost] = []

    def wait() -> None:
        try:
            hub.wait_for_engines()
        except PeerLost as exc:
            errors.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    hub.close()
    waiter.join(5.0)
    assert len(errors) == 1


def test_an_engine_that_reports_its_death_is_gone_after_its_last_output(hub: FrontendHub, dial: Dial) -> None:
    engine = dial(hub.address)
    engine.register()
    (link,) = hub.wait_for_engines(5.0)
    ear = Ear()
    link.subscribe(ear)
    engine.send(ROW)
    engine.send(b"ENGINE_CORE_DEAD")
    _, end = ear.count(2)
    assert isinstance(end, EngineGone)
    assert "death" in end.reason
    link.send(request("nobody hears"))


@pytest.mark.parametrize("spoke", [True, False])
def test_an_engine_that_disconnects_is_gone(hub: FrontendHub, dial: Dial, spoke: bool) -> None:
    engine = dial(hub.address)
    engine.register()
    (link,) = hub.wait_for_engines(5.0)
    ear = Ear()
    link.subscribe(ear)
    if spoke:
        engine.send(ROW)
    engine.close()
    assert isinstance(ear.count(2 if spoke else 1)[-1], EngineGone)


def test_a_stranger_that_connects_and_leaves_is_not_taken_for_the_engine(hub: FrontendHub, dial: Dial) -> None:
    engine = dial(hub.address)
    addresses = engine.register()
    (link,) = hub.wait_for_engines(5.0)
    ear = Ear()
    link.subscribe(ear)
    for address in addresses:
        where = urlsplit(address)
        with socket.create_connection((where.hostname, where.port)) as visitor:
            visitor.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 64)
            while visitor.recv(512):  # until it is turned away
                pass
    engine.send(ROW)
    (event,) = ear.count(1)
    assert isinstance(event, OutputBatch)


def test_unreadable_outputs_are_dropped_and_three_in_a_row_end_the_engine(
    hub: FrontendHub, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    engine = dial(hub.address)
    engine.register()
    (link,) = hub.wait_for_engines(5.0)
    ear = Ear()
    link.subscribe(ear)
    with caplog.at_level(logging.WARNING, logger="tokenspeed.wire"):
        for value in (b"\xc1", ["What"], ROW, [*ROW[:2], "x", *ROW[3:]], b"\xc1", {}):
            engine.send(value)
        batch, end = ear.count(2)
    assert isinstance(batch, OutputBatch)
    assert isinstance(end, EngineGone)
    assert "output_ids" in caplog.text


def test_one_of_two_engines_can_be_dropped_alone(dial: Dial) -> None:
    hub = bind_hub(engines=2)
    engines = [dial(hub.address, index=i) for i in range(2)]
    for engine in engines:
        engine.register()
    links = hub.wait_for_engines(5.0)
    ears = [Ear(), Ear()]
    for link, ear in zip(links, ears, strict=True):
        link.subscribe(ear)
    links[0].close()
    assert isinstance(ears[0].count(1)[0], EngineGone)
    engines[1].send(ROW)
    assert isinstance(ears[1].count(1)[0], OutputBatch)
    hub.close()
    assert isinstance(ears[1].count(2)[1], EngineGone)


def test_an_address_that_cannot_be_bound_is_named(hub: FrontendHub) -> None:
    with pytest.raises(PeerLost, match=hub.address):
        bind_hub(engines=1, address=hub.address)
    with pytest.raises(PeerLost, match="engines=0"):
        bind_hub(engines=0)
