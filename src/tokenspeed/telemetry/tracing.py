"""Export of request traces over OTLP, on a thread of its own behind a bounded queue (KM-36)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

from tokenspeed.errors import SettingsError
from tokenspeed.plane.traces import Begun, NoTracer, TraceEntry, Tracer
from tokenspeed.settings.model import TracingSettings
from tokenspeed.telemetry.logs import DropCount
from tokenspeed.telemetry.trace_ids import (
    Context,
    TraceProvider,
    chosen_provider,
    context_of,
    derived_span_id,
    derived_trace_id,
    parse_traceparent,
    sampled_by_rid,
    traceparent,
)
from tokenspeed.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("tokenspeed.tracing")
BATCH = 64
"""Requests whose spans go out in one call."""
CLOSE_S = 3.0


class Exporter(Protocol):
    """What the SDK's span exporters have in common."""

    def export(self, spans: Sequence[ReadableSpan]) -> object: ...

    def shutdown(self) -> None: ...


@attrs.frozen(kw_only=True, eq=False)
class TraceExport:
    """A `Tracer`: entries that find the queue full are counted and lost.

    Attributes:
        service: which part of a deployment this is; spans of different parts get different ids.
        share: of requests without a sampled parent that are traced, 0 to 1, chosen by request id (KM-41).
    """

    service: str
    entries: queue.Queue[TraceEntry | None]
    drops: DropCount
    share: float
    thread: threading.Thread

    @property
    def active(self) -> bool:
        return True

    def begin(self, rid: str, trace: str) -> Begun | None:
        parent = parse_traceparent(trace) if trace else None
        if not (parent.sampled if parent is not None else sampled_by_rid(rid, self.share)):
            return None
        trace_id = derived_trace_id(rid) if parent is None else parent.trace_id
        span_id = derived_span_id(self.service, rid)
        return Begun(span_id=f"{span_id:016x}", trace=traceparent(trace_id, span_id, sampled=True))

    def add(self, entry: TraceEntry) -> None:
        try:
            self.entries.put_nowait(entry)
        except queue.Full:
            self.drops.add()

    def close(self) -> None:
        """Export what is queued, for a bounded time: a collector may be stalled for good."""
        try:
            self.entries.put(None, timeout=CLOSE_S)
        except queue.Full:
            log.warning("the trace collector takes nothing; %d requests stay unexported", self.entries.qsize())
            return
        self.thread.join(CLOSE_S)
        if self.drops.total:
            log.warning("traces of %d requests were lost: the queue was full", self.drops.total)


def open_tracer(settings: TracingSettings, *, service: str, model: str, exporter: Exporter | None = None) -> Tracer:
    """The tracer that the settings describe; `service`: which part of the deployment speaks.

    Args:
        exporter: takes the place of the OTLP one.
    Raises: SettingsError: OpenTelemetry is not installed, or the provider is unknown.
    """
    if settings.endpoint is None and exporter is None:
        return NoTracer()
    provider = chosen_provider(settings.provider)
    return start_export(
        exporter or _otlp(settings),
        service=service,
        spans_of=_span_maker(service, model, provider),
        share=settings.sample,
        queue_entries=settings.queue,
    )


def start_export(
    exporter: Exporter,
    *,
    service: str,
    spans_of: Callable[[TraceEntry], list[ReadableSpan]],
    share: float,
    queue_entries: int,
) -> TraceExport:
    entries: queue.Queue[TraceEntry | None] = queue.Queue(queue_entries)
    # A daemon: `close` bounds how long a stalled collector is waited for.
    thread = threading.Thread(target=_export, args=(entries, exporter, spans_of), name="ts-trace", daemon=True)
    thread.start()
    return TraceExport(service=service, entries=entries, drops=DropCount(), share=share, thread=thread)


def _export(
    entries: queue.Queue[TraceEntry | None],
    exporter: Exporter,
    spans_of: Callable[[TraceEntry], list[ReadableSpan]],
) -> None:
    """Body of ``ts-trace``: until the end is queued."""
    more = True
    while more:
        found, more = _taken(entries)
        try:
            if found:
                exporter.export([span for entry in found for span in spans_of(entry)])
        except Exception:
            log.exception("the traces of %d requests could not be exported", len(found))
    exporter.shutdown()


def _taken(entries: queue.Queue[TraceEntry | None]) -> tuple[list[TraceEntry], bool]:
    """Wait for an entry, then take what else is there, a batch at most. False: that was the last."""
    found: list[TraceEntry] = []
    entry = entries.get()
    while entry is not None:
        found.append(entry)
        if len(found) == BATCH:
            return found, True
        try:
            entry = entries.get_nowait()
        except queue.Empty:
            return found, True
    return found, False


def _span_maker(service: str, model: str, provider: TraceProvider | None) -> Callable[[TraceEntry], list[ReadableSpan]]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

    resource = Resource.create({"service.name": "tokenspeed", "service.instance.id": service})
    scope = InstrumentationScope("tokenspeed", __version__)

    def context(place: Context, span_id: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(place.trace_id, span_id, is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def spans_of(entry: TraceEntry) -> list[ReadableSpan]:
        place = context_of(entry.rid, entry.trace, provider)
        ids = [derived_span_id(service, f"{entry.rid}/{i}") for i in range(len(entry.spans))]
        ids[0] = int(entry.span_id, 16)
        made = []
        for span_id, span in zip(ids, entry.spans, strict=True):
            parent: SpanContext | None
            if span.parent >= 0:
                parent = context(place, ids[span.parent])
            else:
                parent = None if place.parent_id is None else context(place, place.parent_id, remote=True)
            made.append(
                ReadableSpan(
                    name=span.name,
                    context=context(place, span_id),
                    parent=parent,
                    resource=resource,
                    attributes={
                        "gen_ai.request.id": entry.rid,
                        "gen_ai.response.model": model,
                        **dict(span.attributes),
                    },
                    kind=SpanKind.SERVER if span.parent < 0 else SpanKind.INTERNAL,
                    start_time=round(span.start_s * 1e9),
                    end_time=round(span.end_s * 1e9),
                    instrumentation_scope=scope,
                )
            )
        return made

    return spans_of


def _otlp(settings: TracingSettings) -> Exporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as exc:
        raise SettingsError(
            "tracing.endpoint: traces need OpenTelemetry: pip install 'tokenspeed-py[tracing]'"
        ) from exc
    exporter: Exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=settings.timeout_s)
    return exporter
