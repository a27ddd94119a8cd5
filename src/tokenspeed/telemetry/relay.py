"""The metrics relay: one process of a deployment that runs metric outputs, so that none can delay a rank (KM-25)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import zmq

from tokenspeed.telemetry.events import decode_batch
from tokenspeed.telemetry.outputs import GuardedOutput

log = logging.getLogger("tokenspeed.metrics")
STOP = b""


@attrs.define(eq=False)
class RelayCounts:
    """Writer: MetricsRelay. `malformed` messages were dropped; `lost` events were dropped by ranks, by engine."""

    malformed: int = 0
    lost: dict[int, int] = attrs.field(factory=dict[int, int])


@attrs.frozen(kw_only=True, eq=False)
class MetricsRelay:
    """Hands every batch to every output, on the thread that calls `run`."""

    socket: zmq.Socket[bytes]
    address: str
    outputs: tuple[GuardedOutput, ...]
    counts: RelayCounts = attrs.field(factory=RelayCounts)

    def run(self) -> None:
        """Until `stop`; what was queued before it is still written."""
        while (message := self.socket.recv()) != STOP:
            try:
                batch = decode_batch(message)
            except ValueError as exc:
                self.counts.malformed += 1
                log.warning("dropped a message to the relay: %s", exc)
                continue
            if batch.dropped > self.counts.lost.get(batch.engine, 0):
                log.warning("engine %d has dropped %d metric events: an output is slow", batch.engine, batch.dropped)
                self.counts.lost[batch.engine] = batch.dropped
            for output in self.outputs:
                output.write(batch)

    def stop(self) -> None:
        """From any thread."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.connect(self.address)
        socket.send(STOP)
        socket.close()

    def close(self) -> None:
        for output in self.outputs:
            output.close()
        self.socket.close(linger=0)


def open_relay(address: str, outputs: tuple[GuardedOutput, ...], *, queue: int) -> MetricsRelay:
    """Bind `address`; `queue` messages of a rank wait here at most, as many again at the rank."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    socket.set_hwm(queue)
    socket.bind(address)
    return MetricsRelay(socket=socket, address=address, outputs=outputs)


__all__: Sequence[str] = ("MetricsRelay", "open_relay")
