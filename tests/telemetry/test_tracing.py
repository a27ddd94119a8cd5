"""Spans of requests: made where a request ends, named and exported on a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from tokenspeed.errors import SettingsError
from tokenspeed.plane.traces import SpanValue, TraceEntry, Tracer
from tokenspeed.settings.model import TracingSettings
from tokenspeed.telemetry.trace_ids import (
    TraceProviders,
    chosen_provider,
    context_of,
    derived_trace_id,
    parse_traceparent,
    sampled_by_rid,
    traceparent,
)
from tokenspeed.telemetry.tracing import TraceExport, open_tracer

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = traceparent(TRACE, PARENT, sampled=True)


@attrs.define(eq=False)
class Collector:
    """An exporter that keeps spans; with `held`, the first export waits for `release`."""

    held: bool = False
    spans: list[ReadableSpan] = attrs.field(factory=list)
    threads: set[str] = attrs.field(factory=set)
    entered: threading.Event = attrs.field(factory=threading.Event)
    release: threading.Event = attrs.field(factory=threading.Event)

    def export(self, spans: Any) -> None:
        self.entered.set()
        if self.held:
            assert self.release.wait(20.0)
        self.threads.add(threading.current_thread().name)
        self.spans.extend(spans)

    def shutdown(self) -> None:
        return None


def entry(tracer: Tracer, rid: str = "r", trace: str = "") -> TraceEntry:
    begun = tracer.begin(rid, trace)
    assert begun is not None
    outer = SpanValue(name="engine", start_s=10.0, end_s=12.5, attributes=(("tokens", 4),))
    inner = SpanValue(name="queue", start_s=10.0, end_s=10.5, parent=0)
    return TraceEntry(rid=rid, span_id=begun.span_id, spans=(outer, inner), trace=trace)


@contextmanager
def tracing(collector: Collector, **fields: Any) -> Generator[TraceExport, None, None]:
    tracer = open_tracer(TracingSettings(**fields), service="engine0", model="m", exporter=collector)
    assert isinstance(tracer, TraceExport)
    yield tracer
    collector.release.set()
    tracer.close()
    assert not tracer.thread.is_alive()


def identity(span: ReadableSpan) -> tuple[int, int | None]:
    assert span.context is not None
    return span.context.trace_id, None if span.parent is None else span.parent.span_id


def test_spans_join_the_callers_trace_and_lie_within_each_other() -> None:
    collector = Collector()
    with tracing(collector) as tracer:
        tracer.add(entry(tracer, trace=HEADER))
    outer, inner = collector.spans
    assert (outer.name, outer.start_time, outer.end_time) == ("engine", 10_000_000_000, 12_500_000_000)
    assert identity(outer) == (TRACE, PARENT)
    assert outer.context is not None
    assert identity(inner) == (TRACE, outer.context.span_id)
    assert dict(outer.attributes or {}) == {"gen_ai.request.id": "r", "gen_ai.response.model": "m", "tokens": 4}
    assert outer.resource.attributes["service.name"] == "tokenspeed"


def test_what_is_handed_on_puts_spans_of_another_part_below_the_first_span() -> None:
    front, engine = Collector(), Collector()
    frontend = open_tracer(TracingSettings(), service="frontend", model="m", exporter=front)
    begun = frontend.begin("r", HEADER)
    assert begun is not None
    frontend.add(entry(frontend, trace=HEADER))
    frontend.close()
    with tracing(engine) as tracer:
        tracer.add(entry(tracer, trace=begun.trace))
    assert front.spans[0].context is not None
    assert identity(engine.spans[0]) == (TRACE, front.spans[0].context.span_id)


@pytest.mark.contract("KM-36")
def test_a_stalled_collector_costs_traces_and_holds_nobody() -> None:
    collector = Collector(held=True)
    with tracing(collector, queue=10) as tracer:
        tracer.add(entry(tracer, "first"))
        assert collector.entered.wait(20.0)
        for number in range(100):
            tracer.add(entry(tracer, str(number)))
        assert tracer.drops.total == 90
        assert tracer.entries.qsize() == 10
    assert {span.attributes["gen_ai.request.id"] for span in collector.spans if span.attributes} == {
        "first",
        *map(str, range(10)),
    }


def test_an_export_that_fails_costs_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    @attrs.define(eq=False)
    class Flaky(Collector):
        failed: threading.Event = attrs.field(factory=threading.Event)

        def export(self, spans: Any) -> None:
            if not self.failed.is_set():
                self.failed.set()
                raise ConnectionError("no route")
            super().export(spans)

    collector = Flaky()
    with tracing(collector) as tracer:
        tracer.add(entry(tracer, "lost"))
        assert collector.failed.wait(20.0)
        tracer.add(entry(tracer, "kept"))
    assert [span.attributes["gen_ai.request.id"] for span in collector.spans if span.attributes] == ["kept", "kept"]
    assert "could not be exported" in caplog.text


def pair(rid: str) -> tuple[int, int | None]:
    THREADS.add(threading.current_thread().name)
    return 7, 8


def rootless(rid: str) -> tuple[int, int | None]:
    return 7, None


def nothing(rid: str) -> None:
    return None


def wrong(rid: str) -> Any:
    return "not a pair"


def too_large(rid: str) -> Any:
    return 1 << 128, None


def raising(rid: str) -> Any:
    raise RuntimeError(rid)


THREADS: set[str] = set()


@pytest.mark.contract("KM-38", "KM-40")
@pytest.mark.parametrize(
    ("provider", "trace", "expected"),
    [
        (pair, HEADER, (7, 8)),
        (rootless, HEADER, (7, None)),
        (nothing, HEADER, (TRACE, PARENT)),
        (nothing, "", (derived_trace_id("r"), None)),
        (wrong, HEADER, (TRACE, PARENT)),
        (too_large, HEADER, (TRACE, PARENT)),
        (raising, HEADER, (TRACE, PARENT)),
        (None, "00-garbage", (derived_trace_id("r"), None)),
    ],
)
def test_a_providers_ids_count_if_they_are_ids(provider: Any, trace: str, expected: tuple[int, int | None]) -> None:
    context = context_of("r", trace, provider)
    assert (context.trace_id, context.parent_id) == expected


@pytest.mark.contract("KM-37", "KM-39")
def test_the_chosen_provider_runs_on_the_export_thread_alone() -> None:
    THREADS.clear()
    collector = Collector()
    with tracing(collector, provider=f"{__name__}:pair") as tracer:
        tracer.add(entry(tracer, trace=HEADER))
    assert identity(collector.spans[0]) == (7, 8)
    assert {"ts-trace"} == THREADS == collector.threads


@pytest.mark.contract("KM-37")
def test_an_unknown_provider_ends_the_start_and_none_is_used_unless_chosen() -> None:
    assert chosen_provider(None) is None
    with pytest.raises(SettingsError, match=r"tracing\.provider: unknown provider 'mine'"):
        chosen_provider("mine")
    with pytest.raises(SettingsError, match="no attribute 'nobody'"):
        chosen_provider(f"{__name__}:nobody")
    providers = TraceProviders()
    providers.register_trace_provider("one", pair)
    providers.register_trace_provider("one", rootless)
    assert providers.by_name == {"one": rootless}


@pytest.mark.contract("KM-41")
def test_a_provider_changes_neither_who_is_sampled_nor_names_nor_nesting() -> None:
    seen = []
    for provider in (None, f"{__name__}:pair"):
        collector = Collector()
        with tracing(collector, provider=provider, sample=0.5) as tracer:
            for number in range(64):
                if tracer.begin(str(number), "") is not None:
                    tracer.add(entry(tracer, str(number)))
        spans = collector.spans
        within = {s.context.span_id: s.name for s in spans if s.context is not None}
        seen.append(
            [
                (s.attributes["gen_ai.request.id"], s.name, within.get(s.parent.span_id) if s.parent else None)
                for s in spans
                if s.attributes is not None
            ]
        )
    assert seen[0] == seen[1]
    assert 0 < len(seen[0]) < 128


def test_a_share_of_requests_is_sampled_and_a_caller_decides_for_its_own() -> None:
    share = sum(sampled_by_rid(str(number), 0.25) for number in range(4000)) / 4000
    assert 0.2 < share < 0.3
    assert not any(sampled_by_rid(str(number), 0.0) for number in range(100))
    assert all(sampled_by_rid(str(number), 1.0) for number in range(100))
    with tracing(Collector(), sample=0.0) as tracer:
        assert tracer.begin("r", "") is None
        assert tracer.begin("r", HEADER) is not None
    with tracing(Collector(), sample=1.0) as tracer:
        assert tracer.begin("r", traceparent(TRACE, PARENT, sampled=False)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE:032x}-{PARENT:016x}-01",
        f"00-{0:032x}-{PARENT:016x}-01",
        f"00-{TRACE:032x}-{0:016x}-01",
        f"00-{TRACE:032X}-{PARENT:016x}-01",
        f"00-{TRACE:032x}-{PARENT:016x}",
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert not open_tracer(TracingSettings(), service="s", model="m").active
