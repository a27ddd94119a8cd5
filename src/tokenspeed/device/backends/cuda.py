"""A CUDA device: torch streams and events, copies through pinned memory. Written, and not run on hardware yet.

A job launches its kernels on the submitting thread and returns before they end; its event ends with
them. What a job reads on the host it must have been given, or it waits for the device. One thread a
stream sleeps on events that somebody wants to be told of: the driver tells nobody.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress

import attrs
import torch

from tokenspeed.device.backends.base import DeviceEvent, HostArray, Job
from tokenspeed.device.backends.cuda_api import CudaApi, CudaEventLike, CudaStreamLike, TorchCuda
from tokenspeed.device.backends.host_stream import JobWatch
from tokenspeed.errors import DeviceLost, InvariantBroken, NotSupported
from tokenspeed.plane.ports import Wakeup


@attrs.define(eq=False)
class CudaEventState:
    """Writer: the submitting thread, before anybody else has the event."""

    error: BaseException | None = None


@attrs.frozen(kw_only=True, eq=False)
class CudaEvent:
    """A `DeviceEvent`: the driver's marks before and behind what one job launched.

    Attributes:
        told: of the stream's notifier.
    """

    begun: CudaEventLike
    ended: CudaEventLike
    told: queue.SimpleQueue[tuple[CudaEventLike, Wakeup] | None]
    state: CudaEventState = attrs.field(factory=CudaEventState)

    def query(self) -> bool:
        return self.ended.query()

    def wait(self) -> None:
        self.ended.synchronize()
        if self.state.error is not None:
            raise self.state.error

    def notify(self, wakeup: Wakeup) -> None:
        if self.ended.query():
            wakeup.set()
        else:
            self.told.put((self.ended, wakeup))

    @property
    def busy_s(self) -> float:
        return self.begun.elapsed_time(self.ended) / 1e3 if self.ended.query() else 0.0


class CudaScope(threading.local):
    """Which job the calling thread is inside of; shared by the streams of one backend."""

    event: CudaEvent | None = None

    def current(self) -> CudaEvent:
        """The event of the running job. Raises InvariantBroken outside of one."""
        if self.event is None:
            raise InvariantBroken("device memory touched outside a stream job", thread=threading.current_thread().name)
        return self.event


@attrs.define(eq=False)
class CudaStreamState:
    """Writer: the submitting thread."""

    failure: BaseException | None = None
    closed: bool = False


@attrs.frozen(kw_only=True, eq=False)
class CudaStream:
    """A `DeviceStream`; one thread at a time submits. Open it with `open_cuda_stream`.

    Attributes:
        told: events to sleep on, with whom to wake then; None is the last. Not bounded: one entry for
            each event whose end somebody waits for, a few a round.
    """

    name: str
    api: CudaApi
    stream: CudaStreamLike
    scope: CudaScope
    watch: JobWatch
    notifier: threading.Thread
    told: queue.SimpleQueue[tuple[CudaEventLike, Wakeup] | None]
    state: CudaStreamState = attrs.field(factory=CudaStreamState)

    def submit(self, job: Job, label: str) -> CudaEvent:
        if self.state.closed:
            raise InvariantBroken("a stream used after its close", stream=self.name, label=label)
        if self.scope.event is not None:
            raise InvariantBroken("a job was submitted from a job", stream=self.name, label=label)
        event = CudaEvent(begun=self.api.event(), ended=self.api.event(), told=self.told)
        with self.api.on(self.stream):
            event.begun.record(self.stream)
            if self.state.failure is None:
                self._launch(job, event)
            event.ended.record(self.stream)
        event.state.error = self.state.failure
        return event

    def wait(self, event: DeviceEvent) -> None:
        if not isinstance(event, CudaEvent):
            raise InvariantBroken("a CUDA stream can wait for events of its own device only", stream=self.name)
        self.state.failure = self.state.failure or event.state.error
        self.stream.wait_event(event.ended)

    def close(self, timeout_s: float = 30.0) -> None:
        """Wait for what was launched and join the notifier; a second call does nothing.

        Raises: DeviceLost: the stream has not ended after `timeout_s`.
        """
        if self.state.closed:
            return
        self.state.closed = True
        last = self.api.event()
        with self.api.on(self.stream):
            last.record(self.stream)
        ended = EndOfStream()
        self.told.put((last, ended))
        self.told.put(None)
        self.notifier.join(timeout_s)
        if self.notifier.is_alive():
            raise DeviceLost(f"stream {self.name!r} did not end within {timeout_s:g} s")

    def _launch(self, job: Job, event: CudaEvent) -> None:
        self.scope.event = event
        try:
            with self.watch():
                job()
        except BaseException as error:
            # Kept, not swallowed: this event and every later one of the stream raise it at their waiter.
            self.state.failure = error
        finally:
            self.scope.event = None


@attrs.frozen(eq=False)
class EndOfStream:
    """`Wakeup` that nobody waits on: sleeping until its event is what was wanted."""

    def set(self) -> None:
        return None

    def wait(self, timeout_s: float | None) -> bool:
        return True


@attrs.frozen(kw_only=True, eq=False)
class CudaBuffer:
    """Device memory that only jobs may name."""

    tensor: torch.Tensor = attrs.field(repr=False)
    scope: CudaScope

    def unwrap(self, rows: Iterable[int] | None = None) -> torch.Tensor:
        del rows
        self.scope.current()
        return self.tensor


@attrs.frozen(kw_only=True, eq=False)
class PinnedCopy:
    """A copy into pinned memory that is readable when `event` has ended."""

    values: torch.Tensor = attrs.field(repr=False)
    event: CudaEvent

    def array(self) -> HostArray:
        if not self.event.query():
            raise InvariantBroken("a host copy read before its event")
        copied: HostArray = self.values.numpy()
        return copied


@attrs.frozen(kw_only=True, eq=False)
class CudaBackend:
    """A `Backend` on one graphics device. Open it with `open_cuda_backend`."""

    api: CudaApi
    scope: CudaScope
    exec_stream: CudaStream
    write_stream: CudaStream
    load_stream: CudaStream
    name: str = "cuda"

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> CudaBuffer:
        self.scope.current()
        return CudaBuffer(tensor=torch.zeros(shape, dtype=dtype, device=self.api.device), scope=self.scope)

    def to_device(self, array: HostArray) -> torch.Tensor:
        self.scope.current()
        return self.api.to_device(array)

    def to_host(self, tensor: torch.Tensor) -> PinnedCopy:
        event = self.scope.current()
        values = self.api.pinned(tuple(tensor.shape), tensor.dtype)
        values.copy_(tensor.detach(), non_blocking=True)
        return PinnedCopy(values=values, event=event)

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.api.unpin)  # last: copies may still run
            for stream in (self.exec_stream, self.write_stream, self.load_stream):
                closing.callback(stream.close)


def open_cuda_backend(threads: int, watch: JobWatch = nullcontext, api: CudaApi | None = None) -> CudaBackend:
    """Open the current device; weights are converted on the host with `threads` threads.

    Raises: NotSupported: this torch has no CUDA, or sees no device.
    """
    driver = torch_cuda() if api is None else api
    torch.set_num_threads(threads)
    scope = CudaScope()
    with ExitStack() as opened:
        streams = []
        for name in ("exec", "write", "load"):
            stream = open_cuda_stream(name, driver, scope, watch=watch if name == "exec" else nullcontext)
            opened.callback(stream.close)
            streams.append(stream)
        opened.pop_all()
    return CudaBackend(api=driver, scope=scope, exec_stream=streams[0], write_stream=streams[1], load_stream=streams[2])


def torch_cuda() -> TorchCuda:
    """Raises: NotSupported: this torch has no CUDA, or sees no device."""
    if torch.version.cuda is None:
        raise NotSupported(
            f"device.backend: cuda needs a torch built with CUDA; this is torch {torch.__version__} without; "
            "install one with CUDA, or use cpu"
        )
    if not torch.cuda.is_available():
        raise NotSupported(
            "device.backend: cuda finds no usable device; see that nvidia-smi lists one and that "
            "CUDA_VISIBLE_DEVICES does not hide it, or use cpu"
        )
    return TorchCuda(device=torch.device("cuda", torch.cuda.current_device()))


def open_cuda_stream(name: str, api: CudaApi, scope: CudaScope, watch: JobWatch = nullcontext) -> CudaStream:
    """Make the stream and start its notifier; the caller closes it."""
    told: queue.SimpleQueue[tuple[CudaEventLike, Wakeup] | None] = queue.SimpleQueue()
    # A daemon, so that a process that dies without closing is not kept alive by its device.
    notifier = threading.Thread(target=_notify, args=(told,), name=f"ts-{name}-ends", daemon=True)
    notifier.start()
    return CudaStream(name=name, api=api, stream=api.stream(), scope=scope, watch=watch, notifier=notifier, told=told)


def _notify(told: queue.SimpleQueue[tuple[CudaEventLike, Wakeup] | None]) -> None:
    """Events of one stream end in order, so one sleeper is enough. A device error is the waiter's to meet."""
    while True:
        entry = told.get()
        if entry is None:
            return
        event, wakeup = entry
        with suppress(RuntimeError):
            event.synchronize()
        wakeup.set()
