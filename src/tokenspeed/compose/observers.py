"""Receivers of what a rank says beside its answers: cache events, metrics, traces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

import attrs

from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import EngineInfo, KvEventFeed
from tokenspeed.plane.ports import Meter
from tokenspeed.settings.model import KvEventSettings, Settings
from tokenspeed.telemetry.tracing import open_tracer
from tokenspeed.wire.kv_events import EventFormat, KvEventPublisher, open_publisher


@attrs.frozen(kw_only=True, eq=False)
class Observers:
    """Attributes:
    info: of the engine, with what peers must know of the receivers.
    parts: the receivers by their names in `compose.parts`.
    """

    info: EngineInfo
    parts: Mapping[str, object]


def open_observers(
    settings: Settings,
    info: EngineInfo,
    lifetime: ExitStack,
    *,
    replaced: Collection[str],
    meter_for: Callable[[EngineInfo], Meter] | None,
) -> Observers:
    """What the settings ask for; `lifetime` closes it.

    Args:
        replaced: names of parts that the caller brings.
    Raises: SettingsError: an address cannot be bound.
    """
    parts: dict[str, object] = {}
    if settings.kv_events.endpoint is not None and "kv_sink" not in replaced:
        parts["kv_sink"] = sink = kv_event_sink(settings.kv_events, rank=info.engine_index)
        lifetime.callback(sink.close)
        info = attrs.evolve(info, kv_events=kv_event_feed(settings.kv_events, sink))
    if meter_for is not None and "meter" not in replaced:
        parts["meter"] = meter_for(info)
    if settings.tracing.endpoint is not None and "tracer" not in replaced:
        service = f"engine{info.engine_index}"
        parts["tracer"] = tracer = open_tracer(settings.tracing, service=service, model=info.model)
        lifetime.callback(tracer.close)
    return Observers(info=info, parts=parts)


def kv_event_sink(events: KvEventSettings, *, rank: int) -> KvEventPublisher:
    """The publisher that the settings describe. Raises: SettingsError: an address cannot be bound."""
    if events.endpoint is None:
        raise SettingsError("kv_events.endpoint: missing")
    return open_publisher(
        events.endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.topic,
        event_format=EventFormat(events.format.value),
        rank=rank,
        keep=events.keep_batches,
    )


def kv_event_feed(events: KvEventSettings, sink: KvEventPublisher) -> KvEventFeed:
    """What peers are told of `sink`: addresses as written, from which they find each rank's, or as picked."""

    def told(written: str | None, bound: str | None) -> str | None:
        return bound if written is not None and written.endswith((":0", ":*")) else written

    return KvEventFeed(
        endpoint=told(events.endpoint, sink.endpoint) or sink.endpoint,
        replay_endpoint=told(events.replay_endpoint, sink.replay_endpoint),
        topic=events.topic,
        keep_batches=sink.keep,
        max_queued=sink.max_queued,
        high_water=sink.high_water,
    )
