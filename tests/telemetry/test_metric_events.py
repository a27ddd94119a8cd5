"""Metric events: what a rank sends to the relay, and what the relay does with it."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import zmq
from source_tree import ROOT

from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import EngineInfo, LoadReport
from tokenspeed.plane.results import Sizes
from tokenspeed.telemetry.events import (
    EventBatch,
    MetricEvent,
    Outbox,
    RelayedInstruments,
    decode_batch,
    open_event_socket,
)
from tokenspeed.telemetry.meters import PrometheusMeter, load_gauges, prometheus_meter
from tokenspeed.telemetry.outputs import GuardedOutput, MetricOutput, open_outputs
from tokenspeed.telemetry.registry import new_registry
from tokenspeed.telemetry.relay import open_relay
from tokenspeed.telemetry.table import Kind

INFO = EngineInfo(
    model="m",
    dtype="float32",
    vocab_size=10,
    max_model_len=64,
    num_blocks=10,
    block_size=16,
    max_num_seqs=4,
    max_batched_tokens=64,
    max_waiting=4,
    max_logprobs=5,
    eos_token_ids=(0,),
    kv_capacity_tokens=1000,
)


@attrs.define(eq=False)
class Sent:
    """A `Send` that keeps what it is given; full as long as `full`."""

    batches: list[EventBatch] = attrs.field(factory=list)
    full: bool = False

    def __call__(self, message: bytes) -> bool:
        if not self.full:
            self.batches.append(decode_batch(message))
        return not self.full


@attrs.define(eq=False)
class HandTime:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@attrs.frozen(eq=False)
class Rig:
    sent: Sent = attrs.field(factory=Sent)
    time: HandTime = attrs.field(factory=HandTime)

    def meter(self) -> PrometheusMeter:
        outbox = Outbox(engine=3, send=self.sent, wall_s=lambda: 7.5)
        instruments = RelayedInstruments(registry=new_registry("m", process=False), outbox=outbox, clock_s=self.time)
        gauges = load_gauges(instruments, attrs.evolve(INFO, engine_index=3))
        return prometheus_meter(instruments, engine="3", gauges=gauges)

    def values(self, name: str) -> list[float]:
        return [event.value for batch in self.sent.batches for event in batch.events if event.name == name]


@pytest.mark.contract("KM-25")
def test_every_update_of_a_round_is_sent_as_an_event_in_one_message() -> None:
    rig = Rig()
    meter = rig.meter()
    meter.queued(0.25)
    meter.round(sizes=Sizes(), load=LoadReport(), tokens=20, prompt_tokens=16)
    meter.committed(decode_tokens=4, jit_compiles=0, jit_seconds=0.0)
    assert rig.sent.batches == []
    meter.reported(LoadReport(running=1))
    (batch,) = rig.sent.batches
    assert (batch.engine, batch.sent_s, batch.dropped) == (3, 7.5, 0)
    labels = (("engine", "3"),)
    assert [event for event in batch.events if event.kind is not Kind.GAUGE] == [
        MetricEvent("request_queue_time_seconds", Kind.HISTOGRAM, 0.25, labels),
        MetricEvent("iteration_tokens_total", Kind.HISTOGRAM, 20, labels),
        MetricEvent("iteration_prompt_tokens_total", Kind.COUNTER, 16, labels),
        MetricEvent("decode_tokens_total", Kind.COUNTER, 4, labels),
    ]
    assert rig.values("num_requests_running") == [1]


@pytest.mark.contract("KM-28")
def test_a_gauge_is_sent_when_it_changes_and_unchanged_once_a_second_at_most() -> None:
    rig = Rig()
    meter = rig.meter()
    for _ in range(50):
        meter.reported(LoadReport(running=2))
        rig.time.now_s += 0.019
    assert rig.values("num_requests_running") == [2]
    meter.reported(LoadReport(running=3))
    assert rig.values("num_requests_running") == [2, 3]
    rig.time.now_s += 0.999
    meter.reported(LoadReport(running=3))
    assert rig.values("num_requests_running") == [2, 3]
    rig.time.now_s += 0.001
    meter.reported(LoadReport(running=3))
    assert rig.values("num_requests_running") == [2, 3, 3]


@pytest.mark.contract("KM-26")
def test_events_that_find_the_queue_full_are_dropped_and_counted(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/relay"
    socket = open_event_socket(address, queue=10, context=context)
    outbox = Outbox(engine=0, send=socket, wall_s=lambda: 0.0)
    for number in range(100):
        outbox.add(MetricEvent("decode_tokens_total", Kind.COUNTER, number, ()))
        outbox.flush()
    assert outbox.state.dropped == 90
    # The queued ones arrive when a relay comes up, and later messages say what was lost.
    relay = context.socket(zmq.PULL)
    relay.bind(address)
    kept = [decode_batch(relay.recv()) for _ in range(10)]
    assert [batch.events[0].value for batch in kept] == list(range(10))
    assert socket.socket.poll(20_000, zmq.POLLOUT)  # room comes back when the relay's thread says so
    outbox.add(MetricEvent("decode_tokens_total", Kind.COUNTER, 1, ()))
    outbox.flush()
    assert decode_batch(relay.recv()).dropped == 90
    context.destroy(linger=0)


@attrs.define(eq=False)
class Keeps:
    """An output; raises at every message if `broken`."""

    broken: bool = False
    batches: list[EventBatch] = attrs.field(factory=list)
    closed: int = 0
    seen: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))

    def write(self, batch: EventBatch) -> None:
        self.batches.append(batch)
        self.seen.release()
        if self.broken:
            raise RuntimeError("the other end is gone")

    def close(self) -> None:
        self.closed += 1


def test_an_output_that_raises_and_a_malformed_message_disturb_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/relay"
    broken, good = Keeps(broken=True), Keeps()
    outputs = (GuardedOutput(name="broken", inner=broken), GuardedOutput(name="good", inner=good))
    relay = open_relay(address, outputs, queue=16)
    thread = threading.Thread(target=relay.run)
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_event_socket(address, queue=16, context=context)
    outbox = Outbox(engine=1, send=socket, wall_s=lambda: 0.0)
    event = MetricEvent("decode_tokens_total", Kind.COUNTER, 2.0, (("engine", "1"),))
    for message in (b"\xc1 not msgpack", None, None):
        if message is None:
            outbox.add(event)
            outbox.flush()
        else:
            assert socket(message)
    for output in (broken, good):
        for _ in range(2):
            assert output.seen.acquire(timeout=20.0)
    relay.stop()
    thread.join(20.0)
    assert not thread.is_alive()
    relay.close()
    context.destroy(linger=0)
    assert [batch.events for batch in good.batches] == [(event,), (event,)]
    assert (broken.closed, good.closed) == (1, 1)
    assert relay.counts.malformed == 1
    assert outputs[0].faults.count == 2
    assert sum("metric output broken failed;" in record.getMessage() for record in caplog.records) == 1


def test_json_lines_holds_one_readable_object_a_message(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    (output,) = open_outputs([f"jsonl={file}"])
    output.write(EventBatch(0, 1.5, 4, (MetricEvent("decode_tokens_total", Kind.COUNTER, 2.0, (("engine", "0"),)),)))
    output.close()
    assert json.loads(file.read_text()) == {
        "engine": 0,
        "ts": 1.5,
        "dropped": 4,
        "events": [["decode_tokens_total", "counter", 2.0, {"engine": "0"}]],
    }


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("nowhere", "unknown output 'nowhere'; there are jsonl"),
        ("jsonl", "needs a file"),
        ("jsonl=/nowhere/at/all", "No such file"),
        ("tokenspeed.nothing:make", "tokenspeed.nothing:make: No module named"),
        ("json:nothing", "has no attribute 'nothing'"),
        ("sys:path", "is a list, not a callable"),
        ("builtins:str=x", "made a str, which has no write or close"),
    ],
)
def test_an_output_that_cannot_be_made_is_refused_by_name(wanted: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        open_outputs([wanted])


def test_outputs_made_before_a_refused_one_are_closed() -> None:
    with pytest.raises(SettingsError):
        open_outputs([f"{__name__}:first_output", "nowhere"])
    assert FIRST.closed == 1


FIRST = Keeps()


def first_output(_: str) -> Keeps:
    return FIRST


@pytest.mark.contract("KM-29")
def test_the_output_of_the_documentation_works_as_written(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(block, scope)
    file = tmp_path / "sum"
    output = scope["TokenSum"](str(file))
    assert isinstance(output, MetricOutput)
    events = [("decode_tokens_total", 3.0), ("iteration_tokens_total", 8.0), ("decode_tokens_total", 2.0)]
    output.write(EventBatch(0, 0.0, 0, tuple(MetricEvent(name, Kind.COUNTER, value, ()) for name, value in events)))
    output.close()
    assert file.read_text() == "5 tokens\n"
