"""One suite for every transport: what a link promises holds whatever carries it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import attrs
import pytest
from raw_frontend import receive
from wire_samples import INFO, LOAD, TOP, batch, plain, request

from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.plane.messages import (
    AbortRequest,
    ControlReply,
    EngineEvent,
    EngineGone,
    Finish,
    FlushCacheOp,
    OutputBatch,
    PauseMode,
    PauseOp,
    ResumeOp,
    SamplingParams,
    UnsupportedOp,
)
from tokenspeed.plane.ports import EngineLink, FrontendLink
from tokenspeed.wire.memory import memory_pair
from tokenspeed.wire.traffic import INBOX_SLACK
from tokenspeed.wire.zmq_engine import dial_frontend
from tokenspeed.wire.zmq_frontend import bind_hub

T = TypeVar("T")


@attrs.frozen(eq=False)
class Ear:
    """A listener: notes events and the threads that brought them."""

    changed: threading.Condition = attrs.field(factory=threading.Condition)
    events: list[EngineEvent] = attrs.field(factory=list)
    threads: set[str] = attrs.field(factory=set)

    def __call__(self, event: EngineEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()

    def wait(self, done: Callable[[list[EngineEvent]], T]) -> T:
        with self.changed:
            assert self.changed.wait_for(lambda: done(self.events), 5.0), self.events
            return done(self.events)

    def count(self, count: int) -> list[EngineEvent]:
        self.wait(lambda events: len(events) >= count)
        return self.events


@attrs.frozen(kw_only=True, eq=False)
class Wire:
    engine: FrontendLink
    frontend: EngineLink
    signal: ThreadWakeup
    ear: Ear


@pytest.fixture(params=["memory", "tcp", "ipc"])
def wire(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    signal = ThreadWakeup()
    with ExitStack() as stack:
        if request.param == "memory":
            engine, frontend = memory_pair(INFO, signal)
            stack.callback(frontend.close)
        else:
            tcp = "tcp://127.0.0.1:*"
            hub = bind_hub(
                engines=1,
                address=tcp if request.param == "tcp" else f"ipc://{tmp_path_factory.mktemp('s')}/w",
            )
            stack.callback(hub.close)
            engine = dial_frontend(hub.address, INFO, wakeup=signal, timeout_s=5.0)
            (frontend,) = hub.wait_for_engines(5.0)
        stack.callback(engine.close)
        yield Wire(engine=engine, frontend=frontend, signal=signal, ear=Ear())
    assert [t.name for t in threading.enumerate() if t.name in ("ts-wire", "ts-hub")] == []


def test_both_ends_meet_their_protocols_and_the_registration_arrives(wire: Wire) -> None:
    assert isinstance(wire.engine, FrontendLink)
    assert isinstance(wire.frontend, EngineLink)
    assert wire.frontend.info == INFO


@pytest.mark.contract("FW-14", "FW-16", "FW-17")
def test_messages_arrive_in_the_order_of_sending_and_set_the_wakeup(wire: Wire) -> None:
    ops = [
        PauseOp(call_id=1, mode=PauseMode.WAIT),
        ResumeOp(call_id=2),
        FlushCacheOp(call_id=3, timeout_s=0.25),
        UnsupportedOp(call_id=4, method="collective_rpc"),
    ]
    first = request("a", (1, 2), sampling=SamplingParams(temperature=1 / 3, seed=2**63), cache_salt=b"s", priority=-1)
    sent: list[Any] = [first, *ops, AbortRequest(rids=("a", "b")), request("b")]
    assert wire.engine.receive() == ()
    for message in sent:
        wire.frontend.send(message)
    got = receive(wire.engine, wire.signal, len(sent))
    assert plain(got[0]) == plain(first)
    assert got[1:-1] == sent[1:-1]
    assert got[-1].rid == "b"
    assert wire.engine.receive() == ()


@pytest.mark.contract("RA-50")
def test_outputs_and_replies_arrive_in_the_order_of_sending(wire: Wire) -> None:
    wire.frontend.subscribe(wire.ear)
    for i in range(20):
        wire.engine.send(batch(f"r{i}"))
        wire.engine.reply(ControlReply(call_id=i, success=True))
    events = wire.ear.count(40)
    names = [event.rids[0] if isinstance(event, OutputBatch) else event.call_id for event in events]  # type: ignore[union-attr]
    assert names == [name for i in range(20) for name in (f"r{i}", i)]


@pytest.mark.contract("FW-22", "FW-26")
def test_every_column_of_a_batch_arrives(wire: Wire) -> None:
    wire.frontend.subscribe(wire.ear)
    told = batch(
        "ok",
        "refused",
        "prompt",
        output_ids=[[5, 6], [], [7]],
        finished=[int(Finish.LENGTH), int(Finish.ABORT), int(Finish.STOP)],
        completion_tokens=[9, 0, 1],
        cached_tokens=[2, 0, 0],
        logprobs=[[-0.1, -0.2], [], [-0.3]],
        top_logprobs=[[TOP, TOP], [], []],
        prompt_logprobs=[[], [], [None, -1 / 3]],
        prompt_top_logprobs=[[], [], [None, TOP]],
        prompt_logprob_ids=[[], [], [3, 9]],
        status=[0, 429, 0],
        messages=["", "the queue is full", ""],
        load=LOAD,
    )
    wire.engine.send(told)
    (event,) = wire.ear.count(1)
    assert isinstance(event, OutputBatch)
    assert event == told


@pytest.mark.contract("FW-22")
def test_load_without_tokens_is_an_empty_batch_on_the_same_wire(wire: Wire) -> None:
    wire.frontend.subscribe(wire.ear)
    wire.engine.send(batch(load=LOAD))
    (event,) = wire.ear.count(1)
    assert isinstance(event, OutputBatch)
    assert (event.rids, event.load) == ([], LOAD)


def test_events_from_before_the_subscription_are_delivered_first(wire: Wire) -> None:
    wire.engine.send(batch(load=LOAD))
    wire.engine.send(batch("early"))
    wire.frontend.subscribe(wire.ear)
    wire.engine.send(batch("late"))
    events = wire.ear.count(3)
    assert [event.rids for event in events if isinstance(event, OutputBatch)] == [[], ["early"], ["late"]]


def test_events_come_on_a_wire_thread(wire: Wire) -> None:
    wire.frontend.subscribe(wire.ear)
    wire.engine.send(batch("a"))
    wire.ear.count(1)
    assert wire.ear.threads <= {"ts-wire", "ts-hub"}


def test_a_listener_that_blocks_does_not_block_the_sender(wire: Wire) -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[EngineEvent] = []

    def listener(event: EngineEvent) -> None:
        entered.set()
        leave.wait(10.0)
        seen.append(event)

    wire.frontend.subscribe(listener)
    wire.engine.send(batch("first"))
    assert entered.wait(5.0)
    for i in range(200):
        wire.engine.send(batch(f"r{i}"))  # would deadlock here if delivery ran on the sender
    assert seen == []
    leave.set()


def test_a_listener_that_raises_does_not_end_the_wire(wire: Wire) -> None:
    def listener(event: EngineEvent) -> None:
        wire.ear(event)
        raise RuntimeError("the listener's own fault")

    wire.frontend.subscribe(listener)
    wire.engine.send(batch("a"))
    wire.engine.send(batch("b"))
    wire.ear.count(2)


def test_a_clean_close_of_the_engine_delivers_everything_and_one_end(wire: Wire) -> None:
    wire.frontend.subscribe(wire.ear)
    for i in range(300):
        wire.engine.send(batch(f"r{i}"))
    wire.engine.close()
    wire.engine.send(batch("too late"))
    events = wire.ear.wait(lambda events: events if events and isinstance(events[-1], EngineGone) else None)
    assert [event.rids[0] for event in events if isinstance(event, OutputBatch)] == [f"r{i}" for i in range(300)]
    assert len(events) == 301
    wire.frontend.send(request("nobody hears"))
    wire.engine.close()


def test_a_death_that_was_announced_ends_the_link_after_the_last_output(wire: Wire) -> None:
    wire.frontend.subscribe(wire.ear)
    wire.engine.send(batch("last"))
    wire.engine.announce_death()  # type: ignore[attr-defined]
    wire.engine.close()
    events = wire.ear.wait(lambda events: events if events and isinstance(events[-1], EngineGone) else None)
    assert [type(event) for event in events] == [OutputBatch, EngineGone]


@pytest.mark.contract("FW-5")
def test_an_engine_notices_at_once_that_its_frontend_closed(wire: Wire) -> None:
    wire.frontend.subscribe(wire.ear)
    assert not wire.engine.gone
    wire.frontend.close()
    assert wire.signal.wait(5.0)
    assert wire.engine.gone
    wire.engine.send(batch("into the void"))
    wire.ear.wait(lambda events: bool(events) and isinstance(events[-1], EngineGone))


def test_requests_beyond_the_receive_queue_are_answered_and_aborts_still_pass(wire: Wire) -> None:
    limit = 2 * INFO.max_waiting + INBOX_SLACK
    wire.frontend.subscribe(wire.ear)
    for i in range(limit + 2):
        wire.frontend.send(request(f"r{i}"))
    wire.frontend.send(AbortRequest(rids=("r0",)))
    events = wire.ear.count(2)
    refused = [(event.rids, event.status) for event in events if isinstance(event, OutputBatch)]
    assert refused == [([f"r{limit}"], [429]), ([f"r{limit + 1}"], [429])]
    got = receive(wire.engine, wire.signal, limit + 1)
    assert got[-1] == AbortRequest(rids=("r0",))
    wire.frontend.send(request("again"))
    assert receive(wire.engine, wire.signal)[0].rid == "again"
