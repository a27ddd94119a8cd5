"""Peers of another version: older ones lack what was appended since, newer ones know more than we do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs
import pytest
import zmq
from raw_frontend import REGISTRATION, RawEngine, RawFrontend, add, pack, receive, unpack
from wire_samples import INFO, LOAD, TOP, batch, request

from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.plane.messages import ControlReply, EngineEvent, Finish, FlushCacheOp, OutputBatch, SamplingParams
from tokenspeed.wire.layouts import LAYOUTS, OUTPUT, OUTPUT_FIELDS, REPLY, REQUEST, SAMPLING, layouts_of
from tokenspeed.wire.zmq_engine import ZmqFrontendLink, dial_frontend
from tokenspeed.wire.zmq_frontend import FrontendHub, ZmqEngineLink, bind_hub


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@attrs.define(eq=False)
class Meeting:
    """Our frontend and an engine of another version, registered."""

    hub: FrontendHub
    engine: RawEngine
    link: ZmqEngineLink
    events: list[EngineEvent] = attrs.field(factory=list)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def hear(self, event: EngineEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def heard(self, count: int) -> list[EngineEvent]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= count, 5.0), self.events
            return self.events


def meet(context: zmq.Context, **told: object) -> Meeting:
    hub = bind_hub(engines=1)
    engine = RawEngine(context, hub.address)
    engine.register(pack({**REGISTRATION, **told}))
    (link,) = hub.wait_for_engines(5.0)
    meeting = Meeting(hub=hub, engine=engine, link=link)
    link.subscribe(meeting.hear)
    return meeting


@pytest.fixture
def older(context: zmq.Context) -> Iterator[Meeting]:
    """An engine whose layouts end where the fixed fields end, and whose outputs have no load yet."""
    layouts = {REQUEST: list(LAYOUTS.request[:11]), OUTPUT: list(OUTPUT_FIELDS[:8]), REPLY: ["call_id", "success"]}
    meeting = meet(context, positional_layouts=layouts)
    yield meeting
    meeting.hub.close()
    meeting.engine.close()


@pytest.fixture
def newer(context: zmq.Context) -> Iterator[Meeting]:
    """An engine that has appended fields we have never heard of, some of them in the middle of ours."""
    layouts = {
        REQUEST: [*LAYOUTS.request[:23], "draft_model", *LAYOUTS.request[23:], "shard"],
        SAMPLING: [*LAYOUTS.sampling, "mirostat"],
        OUTPUT: [*LAYOUTS.output, "energy_joules", "shard_of_rows"],
        REPLY: [*LAYOUTS.reply, "took_s"],
        "SomethingElse": ["a", "b"],
    }
    meeting = meet(context, positional_layouts=layouts, quantum_ready=True, request_types=["add", "teleport"])
    yield meeting
    meeting.hub.close()
    meeting.engine.close()


@pytest.mark.contract("FW-10")
def test_an_older_engine_gets_what_it_knows_and_its_short_outputs_are_read(older: Meeting) -> None:
    older.link.send(request("a", (1, 2), sampling=SamplingParams(temperature=0.5)))
    kind, payload = older.engine.next_input()
    message = unpack(payload)
    assert (kind, len(message), message[1], message[4]) == (b"\0", 11, "a", [1, 2])
    older.link.send(FlushCacheOp(call_id=7))
    older.engine.send([OUTPUT, ["a"], [[4]], ["stop"], [2], [1], [0], [[]], [[]]])
    older.engine.send([REPLY, 7, True])
    output, reply = older.heard(2)
    assert isinstance(output, OutputBatch)
    assert (output.rids, output.output_ids, output.finished) == (["a"], [[4]], [int(Finish.STOP)])
    assert (output.load, output.status, output.messages) == (None, [0], [""])
    assert reply == ControlReply(call_id=7, success=True, message="")


@pytest.mark.contract("FW-10")
@pytest.mark.parametrize(
    ("field", "value"), [("cache_salt", b"tenant"), ("priority", 3), ("kind", "embed"), ("unsupported", ("lora",))]
)
def test_what_an_older_engine_cannot_be_told_is_refused_and_not_dropped(
    older: Meeting, field: str, value: object
) -> None:
    older.link.send(request("a", **{field: value}))
    (event,) = older.heard(1)
    assert isinstance(event, OutputBatch)
    assert (event.rids, event.status) == (["a"], [400])
    assert event.messages[0].startswith(field)
    older.link.send(request("b"))
    assert unpack(older.engine.next_input()[1])[1] == "b"


@pytest.mark.contract("FW-10")
def test_a_newer_engine_gets_our_fields_at_its_places_and_its_unknown_columns_are_ignored(newer: Meeting) -> None:
    newer.link.send(request("a", (1, 2), cache_salt=b"tenant", priority=5, sampling=SamplingParams(top_k=3)))
    payload = unpack(newer.engine.next_input()[1])
    names = [*LAYOUTS.request[:23], "draft_model", *LAYOUTS.request[23:], "shard"]
    got = dict(zip(names, payload[1:], strict=False))
    assert (got["rid"], got["input_ids"], got["cache_salt"], got["priority"]) == ("a", [1, 2], b"tenant", 5)
    assert got["draft_model"] is None
    assert got["sampling_params"][5] == 3
    columns = {
        **dict(zip(OUTPUT_FIELDS, [["a"], [[4]], [""], [2], [1], [0], [[]], [[]], 0, 1, 0, 3, 31], strict=True)),
        "kv_resident_pages": 20,
        "energy_joules": 1.5,
        "shard_of_rows": ["east", "west"],
    }
    newer.engine.send([OUTPUT, *(columns.get(name) for name in (*LAYOUTS.output, "energy_joules", "shard_of_rows"))])
    newer.engine.send([REPLY, 7, False, "busy", 0, 0.25])
    output, reply = newer.heard(2)
    assert isinstance(output, OutputBatch)
    assert (output.rids, output.output_ids) == (["a"], [[4]])
    assert output.load is not None
    assert (output.load.active_blocks, output.load.total_blocks, output.load.resident_blocks) == (3, 31, 20)
    assert reply == ControlReply(call_id=7, success=False, message="busy")
    assert newer.link.info.request_types == ("add", "teleport")


@attrs.frozen(eq=False)
class Dialled:
    """Our engine under a frontend of another version."""

    frontend: RawFrontend
    link: ZmqFrontendLink
    signal: ThreadWakeup


@pytest.fixture
def dialled(context: zmq.Context) -> Iterator[Dialled]:
    frontend, signal = RawFrontend(context), ThreadWakeup()
    links: list[ZmqFrontendLink] = []
    address = frontend.at(frontend.handshake)
    dial = threading.Thread(
        target=lambda: links.append(dial_frontend(address, INFO, wakeup=signal, timeout_s=5.0)), daemon=True
    )
    dial.start()
    frontend.greet()
    dial.join(10.0)
    yield Dialled(frontend, links[0], signal)
    links[0].close()
    frontend.close()


@pytest.mark.contract("FW-10")
def test_an_older_frontends_short_request_is_served_and_it_may_read_only_the_columns_it_knows(dialled: Dialled) -> None:
    dialled.frontend.send(0, add("a", [1, 2]))
    (got,) = receive(dialled.link, dialled.signal)
    assert (got.rid, got.cache_salt, got.priority, got.kind, got.unsupported) == ("a", b"", 0, "generate", ())
    dialled.link.send(batch("a", load=LOAD, logprobs=[[-0.5]], top_logprobs=[[TOP]]))
    row = dialled.frontend.next_output()
    assert row[:10] == [OUTPUT, ["a"], [[5]], [""], [3], [1], [0], [[-0.5]], [[5]], 0]


@pytest.mark.contract("FW-10")
def test_a_newer_frontends_longer_request_is_served(dialled: Dialled) -> None:
    message = add("a", [1, 2], None, *[None] * (len(LAYOUTS.request) - 10), {"from": "the future"}, 17)
    message[5] = [*message[5], "mirostat", 2]
    dialled.frontend.send(0, message)
    (got,) = receive(dialled.link, dialled.signal)
    assert (got.rid, got.input_ids.tolist(), got.unsupported) == ("a", [1, 2], ())


def test_layouts_that_say_nothing_of_a_struct_leave_it_at_the_fixed_fields() -> None:
    told = layouts_of({REPLY: ["success", "call_id"]})
    assert told.reply == ("success", "call_id")
    assert told.output == OUTPUT_FIELDS
    assert layouts_of(None) == layouts_of({})
