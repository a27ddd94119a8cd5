"""Lines an operator reads, of rounds and of each request: from values the round had anyway, and never waited for."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
from collections.abc import Iterator

import attrs
import pytest
from doc_snippets import snippets
from prometheus_client.parser import text_string_to_metric_families
from rig import Rig, hand_rig, request, spied
from source_tree import ROOT

from tokenspeed.control.batch_log import BatchLog
from tokenspeed.plane.messages import LoadReport
from tokenspeed.plane.ports import Meter
from tokenspeed.plane.traces import Begun, TraceEntry
from tokenspeed.settings.model import LogFormat, LogSettings, SchedulerSettings, Settings
from tokenspeed.telemetry.logs import LogPipe, start_logging
from tokenspeed.telemetry.meters import NullMeter, prometheus_meter
from tokenspeed.telemetry.registry import new_registry

OFTEN = LogSettings(requests=True, interval_s=0.001)
NEVER = LogSettings(requests=False, interval_s=1e9)


def traffic(rig: Rig, count: int = 10) -> None:
    """`count` requests of different lengths, the last of them aborted while it runs."""
    rig.put(*(request(f"r{i}", 5 + 3 * i, max_new=4 + i) for i in range(count)))
    for number in range(60):
        rig.clock.advance(0.1)
        if number == 6:
            rig.abort(f"r{count - 1}")
        rig.loop.round()
    assert all(rig.link.finish(f"r{i}") for i in range(count))


@contextlib.contextmanager
def logging_to(out: io.TextIOBase, settings: LogSettings, records: int = 4096) -> Iterator[LogPipe]:
    pipe = start_logging(settings, out, queue_records=records)  # type: ignore[arg-type]
    assert isinstance(pipe, LogPipe)
    try:
        yield pipe
    finally:
        pipe.close()


@pytest.mark.contract("KM-30")
def test_lines_ask_the_scheduler_nothing_that_it_is_not_asked_without_them() -> None:
    asked = []
    for settings in (OFTEN, NEVER):
        rig = hand_rig(settings=Settings(log=settings))
        loop, log = spied(rig.loop, "scheduler")
        traffic(attrs.evolve(rig, loop=loop))
        asked.append(log)
    assert asked[0] == asked[1]
    assert len(asked[0]) > 100


def test_each_finished_or_aborted_request_has_one_line_with_its_numbers() -> None:
    out = io.StringIO()
    settings = LogSettings(requests=True, format=LogFormat.JSON, interval_s=1.0)
    with logging_to(out, settings):
        traffic(hand_rig(settings=Settings(log=settings)))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    requests = {line["rid"]: line for line in lines if line["logger"] == "tokenspeed.request"}
    assert len(requests) == sum(line["logger"] == "tokenspeed.request" for line in lines) == 10
    assert [requests[f"r{i}"]["finish"] for i in range(10)] == ["length"] * 9 + ["abort"]
    first = requests["r0"]
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (5, 0, 4)
    assert 0 <= first["queue_s"] < first["first_token_s"] < first["total_s"]
    assert first["message"].startswith("r0: length, 5 prompt (0 cached), 4 output tokens")
    shown = [json.loads(s.text) for s in snippets(ROOT / "docs" / "logs.md") if s.language == "json"]
    assert [list(line) for line in shown if line["logger"] == "tokenspeed.request"] == [list(first)]
    batches = [line for line in lines if line["logger"] == "tokenspeed.batch"]
    assert batches
    assert {"running", "waiting", "kv_usage", "decode_tokens_per_s"} <= set(batches[0])


def test_an_idle_engine_says_nothing_and_its_pauses_dilute_no_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenspeed.batch")
    log = BatchLog(interval_s=10.0)

    def decode(now_s: float) -> None:
        log.record(LoadReport(running=1), decode_tokens=1, prompt_tokens=0, preempted=0, now_s=now_s)

    for at in range(6):
        decode(float(at))
    decode(3600.0)  # an hour later
    assert caplog.records == []
    for at in range(1, 6):
        decode(3600.0 + at)
    (record,) = caplog.records
    assert "12 rounds, 0.0 prompt tok/s, 1.2 decode tok/s" in record.getMessage()


@attrs.define(eq=False)
class Ticking:
    """A `Clock` on which each look takes a millisecond."""

    at_s: float = 1.0

    def now_s(self) -> float:
        self.at_s += 0.001
        return self.at_s


@pytest.mark.contract("KM-11")
@pytest.mark.parametrize("overlap", [True, False])
def test_no_part_of_a_requests_time_is_negative_however_short_its_life_is(overlap: bool) -> None:
    registry, out = new_registry("m", process=False), io.StringIO()
    settings = LogSettings(requests=True, format=LogFormat.JSON)
    scheduling = SchedulerSettings(overlap=overlap)
    with logging_to(out, settings):
        rig = hand_rig(settings=Settings(log=settings, scheduler=scheduling), meter=prometheus_meter(registry))
        rig = attrs.evolve(rig, loop=attrs.evolve(rig.loop, clock=Ticking()))
        rig.put(request("one", 5, max_new=1))
        rig.settle()
    (line,) = [json.loads(text) for text in out.getvalue().splitlines()]
    assert 0 < line["queue_s"] < line["first_token_s"] < line["total_s"]
    sums = {
        sample.name: sample.value
        for family in text_string_to_metric_families(registry.scrape().decode())
        for sample in family.samples
        if sample.name.endswith("_seconds_sum")
    }
    for name in ("queue", "prefill", "decode"):
        assert sums[f"tokenspeed:request_{name}_time_seconds_sum"] > 0, name


@pytest.mark.contract("KM-32", "KM-35")
def test_a_full_pipe_stops_no_round() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"." * 65536)
    os.set_blocking(write_end, True)
    out = os.fdopen(write_end, "w")
    pipe = start_logging(OFTEN, out, queue_records=4)
    traffic(hand_rig(settings=Settings(log=OFTEN)))
    assert pipe.dropped > 10
    assert pipe.close(timeout_s=0.05) is False
    os.close(read_end)  # whatever is stuck fails
    assert isinstance(pipe, LogPipe)
    pipe.thread.join(20.0)
    assert not pipe.thread.is_alive()
    with contextlib.suppress(BrokenPipeError):
        out.close()


@pytest.mark.contract("KM-31")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_without_asynchronous_logging_whoever_logs_writes(asynchronous: bool) -> None:
    names: set[str] = set()

    class Threads(io.StringIO):
        def write(self, text: str) -> int:
            names.add(threading.current_thread().name)
            return len(text)

    out = Threads()
    pipe = start_logging(LogSettings(async_logging=asynchronous), out, loggers=("test.lines.direct",))
    logging.getLogger("test.lines.direct").info("one")
    assert pipe.close()
    assert names == {"ts-log" if asynchronous else "MainThread"}
    assert logging.getLogger("test.lines.direct").handlers == []


@attrs.define(eq=False)
class Spans:
    """A `Tracer` that keeps what it gets."""

    entries: list[TraceEntry] = attrs.field(factory=list)
    active: bool = True

    def begin(self, rid: str, trace: str) -> Begun | None:
        return Begun(span_id="0" * 15 + "1", trace="")

    def add(self, entry: TraceEntry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        return None


@pytest.mark.contract("KM-5", "KM-6")
@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("tracing", [True, False])
def test_metrics_and_traces_are_kept_each_by_its_own_switch(metrics: bool, tracing: bool) -> None:
    registry, spans = new_registry("m", process=False), Spans()
    meter: Meter = prometheus_meter(registry) if metrics else NullMeter()
    rig = hand_rig(meter=meter, **({"tracer": spans} if tracing else {}))
    rig.put(*(request(f"r{i}", 40, max_new=3) for i in range(10)))
    rig.rounds(3)
    stamped = rig.loop.request_stats.stamped
    assert bool(stamped.chunks) is tracing
    rig.settle()
    counts = {
        sample.name: sample.value
        for family in text_string_to_metric_families(registry.scrape().decode())
        for sample in family.samples
    }
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"):
        assert counts.get(f"tokenspeed:{name}_count") == (10 if metrics else None)
    assert len(spans.entries) == (10 if tracing else 0)
    assert stamped.chunks == {}
    assert attrs.fields(NullMeter) == ()  # a rank without an exporter has no place for a sample
