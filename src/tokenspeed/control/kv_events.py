"""Publication of cache events: one batch a round, from the one drain in the round (KM-1)."""

from __future__ import annotations

import attrs

from tokenspeed.plane.ports import KvEventSink
from tokenspeed.plane.results import KvEvent


@attrs.frozen(kw_only=True, eq=False)
class KvEvents:
    sink: KvEventSink

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        if events:
            self.sink.publish(events)


@attrs.frozen(kw_only=True, eq=False)
class NoSink:
    """Nobody listens."""

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        return None

    def close(self) -> None:
        return None
