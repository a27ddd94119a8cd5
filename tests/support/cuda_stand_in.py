"""`CudaApi` without a device: launches happen at once in host memory, and a test says when they have ended."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import attrs
import numpy as np
import torch

from tokenspeed.device.backends.base import HostArray
from tokenspeed.device.backends.cuda_api import CudaEventLike, CudaStreamLike


@attrs.define(eq=False)
class StandInStream:
    """`log` has what was done to it, in order: ``("record", event)``, ``("wait", event)``."""

    number: int
    log: list[tuple[str, int]] = attrs.field(factory=list)
    marks: list[StandInEvent] = attrs.field(factory=list)

    def wait_event(self, event: CudaEventLike) -> None:
        assert isinstance(event, StandInEvent)
        self.log.append(("wait", event.number))

    def synchronize(self) -> None:
        for mark in self.marks:
            mark.synchronize()


@attrs.define(eq=False)
class StandInEvent:
    number: int
    clock_ms: float = 0.0
    ended: threading.Event = attrs.field(factory=threading.Event)

    def record(self, stream: CudaStreamLike) -> None:
        assert isinstance(stream, StandInStream)
        stream.log.append(("record", self.number))
        stream.marks.append(self)

    def query(self) -> bool:
        return self.ended.is_set()

    def synchronize(self) -> None:
        assert self.ended.wait(30)

    def elapsed_time(self, end: CudaEventLike) -> float:
        assert isinstance(end, StandInEvent)
        return end.clock_ms - self.clock_ms


@attrs.define(eq=False)
class StandInCuda:
    """Attributes:
    held: events do not end before `end_all`.
    calls: copies and pinning, in order.
    """

    held: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- a value
    streams: list[StandInStream] = attrs.field(factory=list)
    events: list[StandInEvent] = attrs.field(factory=list)
    calls: list[tuple[str, object]] = attrs.field(factory=list)
    current: list[CudaStreamLike] = attrs.field(factory=list)

    def stream(self) -> StandInStream:
        self.streams.append(StandInStream(len(self.streams)))
        return self.streams[-1]

    def current_stream(self) -> CudaStreamLike:
        return self.current[-1] if self.current else StandInStream(-1)

    def event(self) -> StandInEvent:
        event = StandInEvent(len(self.events), clock_ms=10.0 * len(self.events))
        if not self.held:
            event.ended.set()
        self.events.append(event)
        return event

    @contextmanager
    def on(self, stream: CudaStreamLike) -> Generator[None, None, None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def to_device(self, array: HostArray) -> torch.Tensor:
        self.calls.append(("to_device", self.current_stream()))
        return torch.from_numpy(array.copy())

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.calls.append(("pinned", shape))
        return torch.full(shape, 99).to(dtype)

    def pin(self, array: HostArray) -> None:
        self.calls.append(("pin", array.nbytes))

    def unpin(self) -> None:
        self.calls.append(("unpin", None))

    def end_all(self) -> None:
        self.held = False
        for event in self.events:
            event.ended.set()


def numbers(*values: int) -> HostArray:
    return np.array(values, dtype=np.int64)
