"""A device that has times and no arithmetic: streams over a computed timeline.

A job runs for its effects on the submitting thread, as kernels are launched on a graphics device;
what it did becomes visible to the host at its computed end. How long it takes is what it charges to
the backend's `Work`. Jobs are submitted in an order that respects their streams' waits, so that
running them at once gives the values that the device would have computed.
"""

from __future__ import annotations

import time

import attrs
import numpy as np
import torch

from tokenspeed.device.backends.base import DeviceEvent, HostArray, Job
from tokenspeed.device.backends.cpu import HOST, HostBuffer, LandedArray
from tokenspeed.device.backends.host_stream import JobScope
from tokenspeed.device.backends.simulated_time import (
    DeviceTimer,
    JobObserver,
    NoObserver,
    SimulatedEvent,
    SimulatedJob,
    Timeline,
    open_timer,
)
from tokenspeed.device.host_sync import device_code, host_to_device
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.ports import Clock


@attrs.frozen(eq=False)
class SteadyClock:
    """Seconds of the host's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


@attrs.define(eq=False)
class Work:
    """What the running job has charged. Writers: the job, and the stream before and after it."""

    seconds: float = 0.0

    def charge(self, seconds: float) -> None:
        self.seconds += seconds


@attrs.define(eq=False)
class SimulatedStreamState:
    """Writer: the submitting thread. `after` collects waits for the next job."""

    after: list[SimulatedEvent] = attrs.field(factory=list[SimulatedEvent])
    failure: BaseException | None = None
    closed: bool = False


@attrs.frozen(kw_only=True, eq=False)
class SimulatedStream:
    """A `DeviceStream` without a thread; one thread at a time submits."""

    name: str
    scope: JobScope
    work: Work
    timeline: Timeline
    state: SimulatedStreamState = attrs.field(factory=SimulatedStreamState)

    def submit(self, job: Job, label: str) -> SimulatedEvent:
        state, event = self.state, SimulatedEvent()
        if state.closed:
            raise InvariantBroken("a stream used after its close", stream=self.name)
        after, state.after = tuple(state.after), []
        state.failure = state.failure or next((e.state.error for e in after if e.state.error is not None), None)
        seconds = self._run(job, event) if state.failure is None else 0.0
        self.timeline.place(
            SimulatedJob(stream=self.name, label=label, event=event, after=after, seconds=seconds, error=state.failure)
        )
        return event

    def wait(self, event: DeviceEvent) -> None:
        if not isinstance(event, SimulatedEvent):
            raise InvariantBroken("a simulated stream can wait for events of its own device only", stream=self.name)
        self.state.after.append(event)

    def hold(self) -> None:
        """Stop the device, this stream with the others, before its next job."""
        self.timeline.hold()

    def release(self) -> None:
        self.timeline.release()

    def _run(self, job: Job, event: SimulatedEvent) -> float:
        self.work.seconds, self.scope.event = 0.0, event
        try:
            job()
        except BaseException as error:
            # Kept, not swallowed: this event and every later one of the stream raise it at their waiter.
            self.state.failure = error
        self.scope.event = None
        return self.work.seconds


@attrs.frozen(kw_only=True, eq=False)
class SimulatedBackend:
    """A `Backend` on no hardware at all. Open it with `open_simulated_backend`."""

    scope: JobScope
    work: Work
    timer: DeviceTimer
    exec_stream: SimulatedStream
    write_stream: SimulatedStream
    load_stream: SimulatedStream
    name: str = "simulated"

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        self.scope.current()
        return HostBuffer(tensor=torch.zeros(shape, dtype=dtype), scope=self.scope)

    def to_device(self, array: HostArray) -> torch.Tensor:
        self.scope.current()
        return host_to_device(array, HOST)

    @device_code
    def to_host(self, tensor: torch.Tensor) -> LandedArray:
        values: HostArray = np.array(tensor.detach().numpy())
        return LandedArray(values=values, event=self.scope.current())

    def close(self) -> None:
        """Let no time pass any more: what was submitted has ended. A second call does nothing."""
        for stream in (self.exec_stream, self.write_stream, self.load_stream):
            stream.state.closed = True
        self.timer.close()


def open_simulated_backend(
    *, work: Work | None = None, clock: Clock | None = None, observer: JobObserver | None = None
) -> SimulatedBackend:
    """Start the device's clock.

    Args:
        work: what jobs charge their time to; shared with the model that runs in them.
    """
    timeline = Timeline(clock=clock or SteadyClock(), observer=observer or NoObserver())
    scope, shared = JobScope(), work or Work()
    streams = [
        SimulatedStream(name=name, scope=scope, work=shared, timeline=timeline) for name in ("exec", "write", "load")
    ]
    return SimulatedBackend(
        scope=scope,
        work=shared,
        timer=open_timer(timeline),
        exec_stream=streams[0],
        write_stream=streams[1],
        load_stream=streams[2],
    )
