"""Every update of a rank's metrics as an event, sent to the metrics relay without ever waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import attrs
import msgspec
import zmq

from tokenspeed.telemetry.registry import MetricRegistry
from tokenspeed.telemetry.table import Kind

REPEAT_S = 1.0
"""A gauge that does not change is repeated no sooner (KM-28)."""

Labels = tuple[tuple[str, str], ...]


class MetricEvent(NamedTuple):
    """One update.

    Attributes:
        name: as in the table, without the prefix.
        kind: what `value` is: added to a counter, a gauge's new value, or an observation of a histogram.
        labels: pairs, sorted by name; without ``model_name``.
    """

    name: str
    kind: Kind
    value: float
    labels: Labels


class EventBatch(NamedTuple):
    """What one message carries.

    Attributes:
        engine: index of the rank's engine.
        sent_s: seconds since the epoch.
        dropped: events that the rank has discarded since its start because the queue was full.
    """

    engine: int
    sent_s: float
    dropped: int
    events: tuple[MetricEvent, ...]


class Adds(Protocol):
    def inc(self, amount: float = 1) -> None: ...


class Sets(Protocol):
    def set(self, value: float) -> None: ...


class Observes(Protocol):
    def observe(self, amount: float) -> None: ...


class Instruments(Protocol):
    """Where a meter gets what it writes to: a registry alone, or one whose updates are sent on as events."""

    def counter(self, name: str, **labels: str) -> Adds: ...

    def gauge(self, name: str, **labels: str) -> Sets: ...

    def histogram(self, name: str, **labels: str) -> Observes: ...

    def flush(self) -> None: ...


class Send(Protocol):
    def __call__(self, message: bytes) -> bool:
        """False: the queue is full; never waits."""
        ...


@attrs.define(eq=False)
class OutboxState:
    """Writer: Outbox. `events` are those of the running round; `dropped` counts since the start."""

    events: list[MetricEvent] = attrs.field(factory=list[MetricEvent])
    dropped: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Outbox:
    """Collects a round's events and sends them as one message; a full queue costs the events (KM-26)."""

    engine: int
    send: Send
    wall_s: Callable[[], float]
    state: OutboxState = attrs.field(factory=OutboxState)

    def add(self, event: MetricEvent) -> None:
        self.state.events.append(event)

    def flush(self) -> None:
        state = self.state
        if not state.events:
            return
        batch = EventBatch(self.engine, self.wall_s(), state.dropped, tuple(state.events))
        if not self.send(msgspec.msgpack.encode(batch)):
            state.dropped += len(state.events)
        state.events.clear()


@attrs.frozen(kw_only=True, eq=False)
class RelayedCounter:
    inner: Adds
    name: str
    labels: Labels
    outbox: Outbox

    def inc(self, amount: float = 1) -> None:
        self.inner.inc(amount)
        self.outbox.add(MetricEvent(self.name, Kind.COUNTER, amount, self.labels))


@attrs.frozen(kw_only=True, eq=False)
class RelayedHistogram:
    inner: Observes
    name: str
    labels: Labels
    outbox: Outbox

    def observe(self, amount: float) -> None:
        self.inner.observe(amount)
        self.outbox.add(MetricEvent(self.name, Kind.HISTOGRAM, amount, self.labels))


@attrs.define(eq=False)
class LastSet:
    """Writer: RelayedGauge. What was passed on last, and when."""

    value: float | None = None
    at_s: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class RelayedGauge:
    """Passes on each change, and the same value once a second at most (KM-28)."""

    inner: Sets
    name: str
    labels: Labels
    outbox: Outbox
    clock_s: Callable[[], float]
    last: LastSet = attrs.field(factory=LastSet)

    def set(self, value: float) -> None:
        self.inner.set(value)
        last, now_s = self.last, self.clock_s()
        if value != last.value or now_s - last.at_s >= REPEAT_S:
            last.value, last.at_s = value, now_s
            self.outbox.add(MetricEvent(self.name, Kind.GAUGE, value, self.labels))


@attrs.frozen(kw_only=True, eq=False)
class RelayedInstruments:
    """Writes to a registry and tells the relay.

    Attributes:
        clock_s: monotonic seconds.
    """

    registry: MetricRegistry
    outbox: Outbox
    clock_s: Callable[[], float]

    def counter(self, name: str, **labels: str) -> Adds:
        inner = self.registry.counter(name, **labels)
        return RelayedCounter(inner=inner, name=name, labels=_sorted(labels), outbox=self.outbox)

    def gauge(self, name: str, **labels: str) -> Sets:
        inner = self.registry.gauge(name, **labels)
        return RelayedGauge(inner=inner, name=name, labels=_sorted(labels), outbox=self.outbox, clock_s=self.clock_s)

    def histogram(self, name: str, **labels: str) -> Observes:
        inner = self.registry.histogram(name, **labels)
        return RelayedHistogram(inner=inner, name=name, labels=_sorted(labels), outbox=self.outbox)

    def flush(self) -> None:
        self.outbox.flush()


@attrs.frozen(kw_only=True, eq=False)
class EventSocket:
    """The rank's end of the way to the relay; control thread only. A `Send`."""

    socket: zmq.Socket[bytes]

    def __call__(self, message: bytes) -> bool:
        try:
            self.socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """What is still queued gets a moment to leave; a relay that is gone does not hold the rank."""
        self.socket.close(linger=200)


def open_event_socket(
    address: str, *, queue: int, context: zmq.Context[zmq.Socket[bytes]] | None = None
) -> EventSocket:
    """Connect to the relay at `address`, which need not be there yet; `queue` messages wait at most."""
    socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
    socket.set_hwm(queue)
    socket.connect(address)
    return EventSocket(socket=socket)


def decode_batch(message: bytes) -> EventBatch:
    """Raises: ValueError: not a batch."""
    try:
        return msgspec.msgpack.decode(message, type=EventBatch)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"not a batch of metric events: {exc}") from exc


def _sorted(labels: dict[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


__all__: Sequence[str] = (
    "EventBatch",
    "EventSocket",
    "Instruments",
    "MetricEvent",
    "Outbox",
    "RelayedInstruments",
    "decode_batch",
    "open_event_socket",
)
