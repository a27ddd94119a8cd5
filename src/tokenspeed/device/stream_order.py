"""The debug form of stream discipline: what two jobs touch must be touched by one behind the other.

First in, first out is about who submits and in what order. It does not promise that all work uses one
stream: copies to and from the host tier have streams of their own. A job on another stream owns what it
touches, or a wait that was submitted before puts it behind whoever touched it last; a wait that
follows later does not repair what was read or written meanwhile.

With TOKENSPEED_CAPTURE_CHECK=1 every job has a place, which says how many jobs of each stream come before
it, and every use of storage is compared with the one before. No use has to go wrong for that: a
missing wait is found in runs that were lucky, too. What the host has seen ended comes before whatever is
submitted from then on.

Source: vector clocks, Fidge 1988 and Mattern 1989; Lamport 1978 for what "before" means.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs
import torch

from tokenspeed.device.backends.base import Backend, DeviceBuffer, DeviceEvent, DeviceStream, HostArray, HostCopy, Job
from tokenspeed.device.capture import ENV_SWITCH
from tokenspeed.device.step import ForwardStep, LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.ports import Wakeup

Clock = Mapping[str, int]
NO_JOBS: Clock = MappingProxyType({})


def later(one: Clock, other: Clock) -> Clock:
    """The jobs that are in either."""
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in {*one, *other}}


@attrs.frozen
class Place:
    """Where a job stands.

    Attributes:
        clock: jobs of each stream that come before it, itself included.
    """

    stream: str
    label: str
    clock: Clock

    def is_behind(self, other: Place) -> bool:
        return self.clock.get(other.stream, 0) >= other.clock[other.stream]

    def __str__(self) -> str:
        return f"{self.label!r} of stream {self.stream}"


@attrs.define(eq=False)
class OrderState:
    """Under the lock. `streams`: what the next job of each comes behind; `seen`: what the host has seen ended."""

    streams: dict[str, Clock] = attrs.field(factory=dict[str, Clock])
    seen: Clock = NO_JOBS


class CurrentJob(threading.local):
    """The place of the job that the calling thread is inside of."""

    place: Place | None = None


@attrs.frozen(eq=False)
class StreamOrder:
    """What comes before what on the streams of one backend. Safe from any thread."""

    current: CurrentJob = attrs.field(factory=CurrentJob)
    state: OrderState = attrs.field(factory=OrderState)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def submitted(self, stream: str, label: str) -> Place:
        """The place of the stream's next job."""
        with self.lock:
            clock = dict(later(self.state.streams.get(stream, NO_JOBS), self.state.seen))
            clock[stream] = clock.get(stream, 0) + 1
            self.state.streams[stream] = clock
        return Place(stream, label, clock)

    def joined(self, stream: str, place: Place) -> None:
        """The stream's jobs from here on come behind `place`."""
        with self.lock:
            self.state.streams[stream] = later(self.state.streams.get(stream, NO_JOBS), place.clock)

    def seen_ended(self, place: Place) -> None:
        with self.lock:
            self.state.seen = later(self.state.seen, place.clock)


@attrs.define(eq=False)
class LastUses:
    """Under the lock. `parts` are uses since the last one of the whole."""

    whole: Place | None = None
    parts: dict[int, Place] = attrs.field(factory=dict[int, Place])


@attrs.frozen(kw_only=True, eq=False)
class Storage:
    """Something that jobs share, whole or by parts with numbers."""

    name: str
    order: StreamOrder
    last: LastUses = attrs.field(factory=LastUses)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def use(self, parts: Iterable[int] | None = None) -> None:
        """The running job touches `parts`, None: all of it.

        Raises: InvariantBroken: the use before this one has no place before it.
        """
        place = self.order.current.place
        if place is None:
            return  # outside a job: what guards the device's memory says so
        with self.lock:
            if parts is None:
                earlier = [self.last.whole, *self.last.parts.values()]
                self.last.whole, self.last.parts = place, {}
            else:
                chosen = tuple(parts)
                earlier = [self.last.whole, *(self.last.parts.get(part) for part in chosen)]
                self.last.parts.update(dict.fromkeys(chosen, place))
        for other in earlier:
            if other is not None and not place.is_behind(other):
                raise InvariantBroken(
                    "two jobs use the same storage, and nothing puts one behind the other",
                    storage=self.name,
                    first=str(other),
                    second=str(place),
                )


@attrs.frozen(eq=False)
class OrderedEvent:
    """A `DeviceEvent` that knows its job's place."""

    inner: DeviceEvent
    place: Place
    order: StreamOrder

    def query(self) -> bool:
        ended = self.inner.query()
        if ended:
            self.order.seen_ended(self.place)
        return ended

    def wait(self) -> None:
        self.inner.wait()
        self.order.seen_ended(self.place)

    def notify(self, wakeup: Wakeup) -> None:
        self.inner.notify(wakeup)

    @property
    def busy_s(self) -> float:
        return self.inner.busy_s


@attrs.frozen(eq=False)
class OrderedStream:
    """A `DeviceStream` that gives each job its place."""

    inner: DeviceStream
    order: StreamOrder

    @property
    def name(self) -> str:
        return self.inner.name

    def submit(self, job: Job, label: str) -> DeviceEvent:
        place, current = self.order.submitted(self.name, label), self.order.current

        def placed() -> None:
            current.place = place
            try:
                job()
            finally:
                current.place = None

        return OrderedEvent(self.inner.submit(placed, label), place, self.order)

    def wait(self, event: DeviceEvent) -> None:
        if isinstance(event, OrderedEvent):
            self.order.joined(self.name, event.place)
            event = event.inner
        self.inner.wait(event)


@attrs.frozen(eq=False)
class OrderedBuffer:
    """A `DeviceBuffer` whose uses are compared."""

    inner: DeviceBuffer
    storage: Storage

    def unwrap(self, rows: Iterable[int] | None = None) -> torch.Tensor:
        tensor = self.inner.unwrap()
        self.storage.use(rows)
        return tensor


@attrs.frozen(kw_only=True, eq=False)
class OrderedStep:
    """A `ForwardStep` whose scratch, which every run uses, is storage that jobs share."""

    inner: ForwardStep
    scratch: Storage

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.scratch.use()
        return self.inner.run(rows, layers=layers, ready=ready, hidden=hidden)


@attrs.frozen(kw_only=True, eq=False)
class OrderedBackend:
    """A `Backend` in whose jobs storage is checked."""

    inner: Backend
    order: StreamOrder
    exec_stream: DeviceStream
    write_stream: DeviceStream
    load_stream: DeviceStream

    @property
    def name(self) -> str:
        return self.inner.name

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceBuffer:
        name = f"buffer of {shape} {dtype}"
        return OrderedBuffer(self.inner.allocate(shape, dtype), Storage(name=name, order=self.order))

    def to_device(self, array: HostArray) -> torch.Tensor:
        return self.inner.to_device(array)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return self.inner.to_host(tensor)

    def close(self) -> None:
        self.inner.close()


def ordered(backend: Backend) -> OrderedBackend:
    """`backend`, whose streams must not be used directly from here on."""
    order = StreamOrder()
    return OrderedBackend(
        inner=backend,
        order=order,
        exec_stream=OrderedStream(backend.exec_stream, order),
        write_stream=OrderedStream(backend.write_stream, order),
        load_stream=OrderedStream(backend.load_stream, order),
    )


def checked_backend(backend: Backend, environ: Mapping[str, str]) -> Backend:
    """`ordered(backend)` where the environment has TOKENSPEED_CAPTURE_CHECK=1."""
    return ordered(backend) if environ.get(ENV_SWITCH) == "1" else backend


def checked_step(step: ForwardStep, backend: Backend) -> ForwardStep:
    """`step`, or `OrderedStep` on a backend that is checked."""
    if not isinstance(backend, OrderedBackend):
        return step
    return OrderedStep(inner=step, scratch=Storage(name="scratch of the step", order=backend.order))
