"""A rank's side of the metrics: its files for the frontend's scrape, and its events for the relay."""

from __future__ import annotations

import time

import attrs

from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.ports import Meter
from tokenspeed.settings.model import MetricsSettings
from tokenspeed.telemetry.events import EventSocket, Outbox, RelayedInstruments, open_event_socket
from tokenspeed.telemetry.meters import load_gauges, prometheus_meter
from tokenspeed.telemetry.registry import new_registry


@attrs.frozen(kw_only=True, eq=False)
class RankMeters:
    """Makes the rank's one meter, and owns the way to the relay.

    Attributes:
        index: of the rank's engine, the label `engine`.
        socket: None: no relay.
    """

    index: int
    socket: EventSocket | None

    def meter_for(self, info: EngineInfo) -> Meter:
        """Numbers go to files beside each other if the process was started with a directory for them.

        prometheus-client decides that by ``PROMETHEUS_MULTIPROC_DIR`` when it is imported.
        """
        registry = new_registry(info.model, process=False)
        engine = str(self.index)
        if self.socket is None:
            return prometheus_meter(registry, engine=engine)
        outbox = Outbox(engine=self.index, send=self.socket, wall_s=time.time)
        instruments = RelayedInstruments(registry=registry, outbox=outbox, clock_s=time.monotonic)
        gauges = load_gauges(instruments, attrs.evolve(info, engine_index=self.index))
        return prometheus_meter(instruments, engine=engine, gauges=gauges)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


def open_rank_meters(settings: MetricsSettings, *, index: int, relay: str | None) -> RankMeters:
    """`relay`: address of the metrics relay, if the deployment has one."""
    socket = None if relay is None else open_event_socket(relay, queue=settings.queue)
    return RankMeters(index=index, socket=socket)
