"""Our engine's end against a frontend that shares no code with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import msgspec
import pytest
import zmq
from raw_frontend import RawFrontend, add, pack, receive, sampling
from wire_samples import INFO, LOAD, batch

from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.errors import PeerLost
from tokenspeed.plane.messages import AbortRequest, ControlReply, Finish, FlushCacheOp, GenerateRequest, KvEventFeed
from tokenspeed.wire.codec import Answer, Arrival, EngineCodec
from tokenspeed.wire.layouts import LAYOUTS, OUTPUT, REPLY, REQUEST
from tokenspeed.wire.zmq_engine import ZmqFrontendLink, dial_frontend


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def frontend(context: zmq.Context) -> Iterator[RawFrontend]:
    frontend = RawFrontend(context)
    yield frontend
    frontend.close()


class Dialled:
    """An engine's link, dialled on a thread of its own while the test plays the frontend."""

    def __init__(self, address: str, **options: object) -> None:
        self.signal = ThreadWakeup()
        self.links: list[ZmqFrontendLink] = []
        self.errors: list[Exception] = []
        info = options.pop("info", INFO)
        fields = {"wakeup": self.signal, "timeout_s": 5.0, **options}

        def dial() -> None:
            try:
                self.links.append(dial_frontend(address, info, **fields))  # type: ignore[arg-type]
            except PeerLost as exc:
                self.errors.append(exc)

        self.thread = threading.Thread(target=dial)
        self.thread.start()

    @property
    def link(self) -> ZmqFrontendLink:
        self.thread.join(10.0)
        assert self.errors == []
        return self.links[0]

    def close(self) -> None:
        self.thread.join(10.0)
        for link in self.links:
            link.close()


@pytest.fixture
def engine(frontend: RawFrontend) -> Iterator[Dialled]:
    dialled = Dialled(frontend.at(frontend.handshake))
    frontend.greet()
    yield dialled
    dialled.close()


class Schema(msgspec.Struct, kw_only=True):
    """What a gateway insists on, and the types it insists on for the rest."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    dp_stats_address: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    kv_cache_size_tokens: int | None
    kv_cache_max_concurrency: float | None
    kv_events_config: None
    request_types: list[str]
    positional_layouts: dict[str, list[str]]
    disaggregation_mode: str | None
    model_type: str
    architectures: list[str]


@pytest.mark.contract("FW-1", "FW-2", "FW-7", "FW-8", "FW-11")
def test_an_engine_greets_once_and_registers_what_it_serves(engine: Dialled, frontend: RawFrontend) -> None:
    assert not engine.link.gone
    assert [(identity, greeting["status"]) for identity, greeting in frontend.greetings] == [
        (b"\0\0", "HELLO"),
        (b"\0\0", "READY"),
    ]
    assert frontend.greetings[0][1]["engine_count"] == 1
    told = frontend.registrations[b"\0\0"]
    schema = msgspec.convert(told, Schema)
    assert schema.dtype in ("float16", "bfloat16", "float32")
    assert schema.request_types == ["add", "abort", "control"]
    assert schema.disaggregation_mode == "null"
    assert "prefix_granularity" not in told
    assert (schema.max_model_len, schema.num_gpu_blocks, schema.kv_cache_size_tokens) == (128, 32, 500)
    assert told["vocab_size"] == 96
    assert told["eos_token_ids"] == [2, 7]


class Feed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a gateway insists on in ``kv_events_config``: all of it."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str


def test_an_engine_that_publishes_cache_events_tells_where_and_how_many_it_keeps(
    context: zmq.Context, frontend: RawFrontend
) -> None:
    feed = KvEventFeed(
        endpoint="tcp://*:5557", replay_endpoint=None, topic="kv", keep_batches=9, max_queued=8, high_water=7
    )
    dialled = Dialled(frontend.at(frontend.handshake), info=attrs.evolve(INFO, kv_events=feed))
    try:
        frontend.greet()
        told = frontend.registrations[b"\0\0"]["kv_events_config"]
        assert msgspec.convert(told, Feed) == Feed(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint="tcp://*:5557",
            replay_endpoint=None,
            buffer_steps=9,
            hwm=7,
            max_queue_size=8,
            topic="kv",
        )
    finally:
        dialled.close()


@pytest.mark.contract("FW-10")
def test_a_registration_carries_the_order_of_every_positional_struct(engine: Dialled, frontend: RawFrontend) -> None:
    engine.link.send(batch("a", load=LOAD))
    layouts = frontend.registrations[b"\0\0"]["positional_layouts"]
    assert layouts[REPLY] == ["call_id", "success", "message", "engine_index"]
    row = dict(zip(layouts[OUTPUT], frontend.next_output()[1:], strict=True))
    assert (row["rids"], row["kv_total_pages"], row["kv_resident_pages"]) == (["a"], 31, 20)
    assert layouts[REQUEST][3] == "input_ids"


@pytest.mark.contract("FW-10")
def test_a_frontend_that_follows_another_announced_order_is_understood(
    frontend: RawFrontend, context: zmq.Context
) -> None:
    names = list(LAYOUTS.request)
    at, other = names.index("input_ids"), names.index("created_time")
    names[at], names[other] = names[other], names[at]
    dialled = Dialled(frontend.at(frontend.handshake), layouts=attrs.evolve(LAYOUTS, request=tuple(names)))
    frontend.greet()
    announced = frontend.registrations[b"\0\0"]["positional_layouts"][REQUEST]
    values = {"rid": "a", "input_ids": [4, 5], "created_time": 2.5, "sampling_params": sampling(), "stream": True}
    frontend.send(0, ["TokenizedGenerateReqInput", *(values.get(name) for name in announced)])
    (got,) = receive(dialled.link, dialled.signal)
    assert (got.rid, got.input_ids.tolist(), got.created_s) == ("a", [4, 5], 2.5)
    dialled.close()


@pytest.mark.contract("FW-14")
def test_interleaved_requests_are_told_apart_by_rid(engine: Dialled, frontend: RawFrontend) -> None:
    for rid, ids in (("a", [1]), ("b", [2, 3])):
        frontend.send(0, add(rid, ids))
    got = receive(engine.link, engine.signal, 2)
    assert [(m.rid, m.input_ids.tolist()) for m in got] == [("a", [1]), ("b", [2, 3])]
    engine.link.send(batch("b", "a", output_ids=[[8], [9]]))
    row = frontend.next_output()
    assert dict(zip(row[1], row[2], strict=True)) == {"b": [8], "a": [9]}


@pytest.mark.contract("FW-16", "FW-18")
def test_calls_are_answered_under_their_own_ids_when_the_loop_replies(engine: Dialled, frontend: RawFrontend) -> None:
    frontend.send(2, [11, "flush_cache", [0.0]])
    frontend.send(2, [12, "flush_cache", [1.0]])
    got = receive(engine.link, engine.signal, 2)
    assert got == [FlushCacheOp(call_id=11), FlushCacheOp(call_id=12, timeout_s=1.0)]
    assert not frontend.output.poll(50)  # no answer before the operation's reply
    engine.link.reply(ControlReply(call_id=12, success=False, message="busy"))
    engine.link.reply(ControlReply(call_id=11, success=True))
    assert frontend.next_output() == ["ControlReplySlim", 12, False, "busy", 0]
    assert frontend.next_output() == ["ControlReplySlim", 11, True, "", 0]


@pytest.mark.contract("FW-19")
def test_an_unknown_method_is_answered_and_never_reaches_the_loop(engine: Dialled, frontend: RawFrontend) -> None:
    frontend.send(2, [5, "nope", []])
    tag, call_id, success, message, index = frontend.next_output()
    assert (tag, call_id, success, index) == ("ControlReplySlim", 5, False, 0)
    assert "nope" in message
    frontend.send(1, ["z"])
    assert receive(engine.link, engine.signal) == [AbortRequest(rids=("z",))]


def test_bad_frames_are_dropped_with_one_line_and_the_wire_goes_on(
    engine: Dialled, frontend: RawFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tokenspeed.wire"):
        frontend.send_raw([b"\0", b"\xc1\xff"])
        frontend.send_raw([b"\x07", pack([])])
        frontend.send_raw([b""])
        frontend.send(0, ["SomethingElse"])
        frontend.send(0, add("good", [1]))
        (got,) = receive(engine.link, engine.signal)
    assert isinstance(got, GenerateRequest)
    assert len(caplog.records) == 4
    assert "payload" in caplog.text
    assert "type" in caplog.text


def test_a_faulty_request_is_ended_towards_its_client(engine: Dialled, frontend: RawFrontend) -> None:
    frontend.send(0, add("bad", [1], sampling(p3="hot")))
    row = frontend.next_output()
    column = dict(zip(LAYOUTS.output, row[1:], strict=True))
    assert (column["rids"], column["finished_reasons"], column["finished_status_codes"]) == (["bad"], ["abort"], [400])
    assert "sampling_params.temperature" in column["finished_messages"][0]
    frontend.send(0, add("good", [1]))
    assert receive(engine.link, engine.signal)[0].rid == "good"


def bind_when_free(socket: zmq.Socket, address: str) -> None:
    """A closed socket gives its port back on ZeroMQ's own thread, some time later."""
    until = time.monotonic() + 10.0
    while True:
        try:
            socket.bind(address)
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EADDRINUSE or time.monotonic() > until:
                raise
            threading.Event().wait(0.01)
        else:
            return


@pytest.mark.contract("FW-5")
def test_an_engine_does_not_resume_with_another_frontend_at_the_same_address(
    engine: Dialled, frontend: RawFrontend, context: zmq.Context
) -> None:
    link = engine.link
    address = frontend.at(frontend.input)
    output_address = frontend.at(frontend.output)
    frontend.close()
    assert engine.signal.wait(5.0)
    assert link.gone
    again, outward = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    bind_when_free(again, address)
    bind_when_free(outward, output_address)
    link.send(batch("a"))
    assert not again.poll(300)
    assert not outward.poll(100)
    again.close(0)
    outward.close(0)


def test_outputs_wait_for_a_frontend_that_reads_late(engine: Dialled, frontend: RawFrontend) -> None:
    link = engine.link
    text = "x" * 4096
    for i in range(3000):  # more than both sockets buffer
        link.send(batch(f"r{i}", finished=[int(Finish.ABORT)], messages=[text]))
    assert [frontend.next_output()[1][0] for _ in range(3000)] == [f"r{i}" for i in range(3000)]
    assert not link.gone


def test_close_is_bounded_when_the_frontend_does_not_read(engine: Dialled, frontend: RawFrontend) -> None:
    link = engine.link
    for i in range(3000):
        link.send(batch(f"r{i}", finished=[int(Finish.ABORT)], messages=["x" * 4096]))
    closer = threading.Thread(target=link.close)
    closer.start()
    closer.join(10.0)
    assert not closer.is_alive()


def test_a_failing_engine_says_so_in_the_raw_words(engine: Dialled, frontend: RawFrontend) -> None:
    engine.link.announce_death()
    assert frontend.next_output() == b"ENGINE_CORE_DEAD"
    engine.link.close()
    assert frontend.engine_left()


def test_an_engine_may_start_before_its_frontend(context: zmq.Context, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/handshake"
    dialled = Dialled(address)
    frontend = RawFrontend(context)
    frontend.handshake.bind(address)
    frontend.greet()
    assert not dialled.link.gone
    dialled.close()
    frontend.close()


def test_two_engines_share_one_frontend_by_their_identities(context: zmq.Context) -> None:
    frontend = RawFrontend(context, engines=2)
    pair = [
        Dialled(frontend.at(frontend.handshake), info=attrs.evolve(INFO, engine_index=i, engine_count=2))
        for i in range(2)
    ]
    frontend.greet()
    assert sorted(frontend.registrations) == [b"\0\0", b"\1\0"]
    assert frontend.registrations[b"\1\0"]["data_parallel_rank"] == 1
    for i, dialled in enumerate(pair):
        frontend.send(0, add(f"to {i}", [1]), index=i)
        assert receive(dialled.link, dialled.signal)[0].rid == f"to {i}"
    pair[1].link.send(batch("to 1"))
    assert frontend.next_output()[9] == 1
    for dialled in pair:
        dialled.close()
    frontend.close()


def test_a_frontend_that_never_answers_is_reported_with_its_address(context: zmq.Context) -> None:
    silent = context.socket(zmq.ROUTER)
    silent.bind("tcp://127.0.0.1:*")
    address = RawFrontend.at(silent)
    with pytest.raises(PeerLost, match=f"no frontend answered at {address}"):
        dial_frontend(address, INFO, wakeup=ThreadWakeup(), timeout_s=0.2)
    silent.close(0)
    with pytest.raises(PeerLost, match="tcp:/nowhere"):
        dial_frontend("tcp:/nowhere", INFO, wakeup=ThreadWakeup(), timeout_s=0.2)


def test_a_strange_answer_to_the_greeting_is_reported(frontend: RawFrontend) -> None:
    dialled = Dialled(frontend.at(frontend.handshake))
    identity, _ = frontend.handshake.recv_multipart()
    frontend.handshake.send_multipart([identity, pack({"addresses": {"inputs": []}})])
    dialled.thread.join(10.0)
    assert len(dialled.errors) == 1
    assert "addresses" in str(dialled.errors[0])


@attrs.frozen(eq=False)
class SlowCodec:
    """Encodes only when told to, and notes on which thread."""

    go: threading.Event = attrs.field(factory=threading.Event)
    threads: list[str] = attrs.field(factory=list)
    inner: EngineCodec = attrs.field(factory=EngineCodec)

    def decode(self, frames: Sequence[bytes]) -> Arrival:
        self.threads.append(threading.current_thread().name)
        return self.inner.decode(frames)

    def encode(self, event: Answer) -> bytes:
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(10.0)
        return self.inner.encode(event)


@pytest.mark.contract("PT-9")
def test_encoding_runs_on_the_wire_thread_and_the_sender_does_not_wait_for_it(frontend: RawFrontend) -> None:
    codec = SlowCodec()
    dialled = Dialled(frontend.at(frontend.handshake), codec=codec)
    frontend.greet()
    for i in range(50):
        dialled.link.send(batch(f"r{i}"))  # would wait for ever if the sender encoded
    assert not frontend.output.poll(50)
    codec.go.set()
    assert [frontend.next_output()[1][0] for _ in range(50)] == [f"r{i}" for i in range(50)]
    frontend.send(1, ["a"])
    receive(dialled.link, dialled.signal)
    assert set(codec.threads) == {"ts-wire"}
    dialled.close()


@attrs.frozen(eq=False)
class BrokenCodec:
    inner: EngineCodec = attrs.field(factory=EngineCodec)

    def decode(self, frames: Sequence[bytes]) -> Arrival:
        raise ZeroDivisionError

    def encode(self, event: Answer) -> bytes:
        return self.inner.encode(event)


def test_a_fault_of_the_wire_itself_ends_the_engine_instead_of_leaving_it_deaf(frontend: RawFrontend) -> None:
    dialled = Dialled(frontend.at(frontend.handshake), codec=BrokenCodec())
    frontend.greet()
    link = dialled.link
    frontend.send(1, ["a"])
    assert dialled.signal.wait(5.0)
    assert link.gone
    dialled.close()
