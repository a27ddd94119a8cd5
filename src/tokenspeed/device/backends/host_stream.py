"""A stream on the CPU: one worker thread with a FIFO queue, events, and waits between streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeAlias

import attrs

from tokenspeed.device.backends.base import DeviceEvent, Job
from tokenspeed.device.sync_trap import note_wait
from tokenspeed.errors import DeviceLost, InvariantBroken
from tokenspeed.plane.ports import Wakeup

QUEUE_CAPACITY = 256
"""Entries a stream holds before `submit` blocks; a round submits about four."""


JobWatch: TypeAlias = Callable[[], AbstractContextManager[object]]
"""What each job of a stream runs inside of."""


@attrs.define(eq=False)
class EventState:
    """Writer: the stream's thread, under the event's lock. `listeners` is emptied at the end."""

    listeners: list[Wakeup] = attrs.field(factory=list[Wakeup])
    error: BaseException | None = None
    busy_s: float = 0.0


@attrs.frozen(eq=False)
class HostEvent:
    """A `DeviceEvent` over one `threading.Event`."""

    done: threading.Event = attrs.field(factory=threading.Event)
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    state: EventState = attrs.field(factory=EventState)

    def query(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        if not self.done.is_set():
            note_wait("an event")
            self.done.wait()
        if self.state.error is not None:
            raise self.state.error

    def notify(self, wakeup: Wakeup) -> None:
        with self.lock:
            if not self.done.is_set():
                self.state.listeners.append(wakeup)
                return
        wakeup.set()

    @property
    def busy_s(self) -> float:
        return self.state.busy_s

    def complete(self, error: BaseException | None, busy_s: float) -> None:
        """End the job; called once, by the stream's thread."""
        self.state.error = error
        self.state.busy_s = busy_s
        with self.lock:
            self.done.set()
            listeners, self.state.listeners = self.state.listeners, []
        for wakeup in listeners:
            wakeup.set()


@attrs.frozen(eq=False)
class Submitted:
    job: Job
    label: str
    event: HostEvent


@attrs.frozen(eq=False)
class Awaited:
    event: DeviceEvent


@attrs.frozen(eq=False)
class Ended:
    """The last entry of a stream's queue."""


Entry: TypeAlias = Submitted | Awaited | Ended


class JobScope(threading.local):
    """Which job the calling thread is inside of; shared by the streams of one backend."""

    event: HostEvent | None = None

    def current(self) -> HostEvent:
        """The event of the running job. Raises InvariantBroken outside of one."""
        if self.event is None:
            raise InvariantBroken("device memory touched outside a stream job", thread=threading.current_thread().name)
        return self.event


@attrs.define(eq=False)
class StreamState:
    """Writer: the stream's thread, but for `closed` (the closer)."""

    failure: BaseException | None = None
    running: str = ""
    closed: bool = False


@attrs.frozen(kw_only=True, eq=False)
class HostStream:
    """A `DeviceStream` with a thread of its own. Open it with `open_host_stream`.

    The queue is bounded: a submitter far ahead of the device blocks, which is backpressure on the
    forward thread and on nobody else.

    Attributes:
        gate: closed by `hold`; a test's means to keep the device busy for as long as it likes.
    """

    name: str
    scope: JobScope
    thread: threading.Thread
    entries: queue.Queue[Entry]
    gate: threading.Event
    state: StreamState

    def submit(self, job: Job, label: str) -> HostEvent:
        event = HostEvent()
        self._put(Submitted(job, label, event))
        return event

    def wait(self, event: DeviceEvent) -> None:
        self._put(Awaited(event))

    def hold(self) -> None:
        """Start no further job until `release`; the one that runs goes on."""
        self.gate.clear()

    def release(self) -> None:
        self.gate.set()

    def close(self, timeout_s: float = 30.0) -> None:
        """Run what is queued and join the thread; a second call does nothing.

        Raises: DeviceLost: the thread has not ended after `timeout_s`.
        """
        if self.state.closed:
            return
        self.state.closed = True
        self.gate.set()
        until_s = time.monotonic() + timeout_s
        with suppress(queue.Full):  # its thread does not come back to it
            self.entries.put(Ended(), timeout=timeout_s)
        self.thread.join(max(0.0, until_s - time.monotonic()))
        if self.thread.is_alive():
            raise DeviceLost(f"stream {self.name!r} did not end within {timeout_s:g} s, inside {self.state.running!r}")

    def _put(self, entry: Entry) -> None:
        if self.state.closed:
            raise InvariantBroken("a stream used after its close", stream=self.name)
        self.entries.put(entry)


def open_host_stream(
    name: str, scope: JobScope, capacity: int = QUEUE_CAPACITY, watch: JobWatch = nullcontext
) -> HostStream:
    """Start the thread of a stream; the caller closes it."""
    entries: queue.Queue[Entry] = queue.Queue(capacity)
    gate, state = threading.Event(), StreamState()
    gate.set()
    # A daemon, so that a process that dies without closing is not kept alive by its device.
    thread = threading.Thread(target=_work, args=(entries, gate, scope, state, watch), name=f"ts-{name}", daemon=True)
    thread.start()
    return HostStream(name=name, scope=scope, thread=thread, entries=entries, gate=gate, state=state)


def _work(
    entries: queue.Queue[Entry], gate: threading.Event, scope: JobScope, state: StreamState, watch: JobWatch
) -> None:
    while True:
        entry = entries.get()
        gate.wait()
        match entry:
            case Submitted():
                _perform(entry, scope, state, watch)
            case Awaited(event=event):
                try:
                    event.wait()
                except BaseException as error:
                    state.failure = state.failure or error
            case Ended():
                return
        del entry  # an idle stream must not keep the tensors of its last job alive


def _perform(entry: Submitted, scope: JobScope, state: StreamState, watch: JobWatch) -> None:
    busy_s = 0.0
    if state.failure is None:
        state.running, scope.event = entry.label, entry.event
        begun = time.perf_counter()
        try:
            with watch():
                entry.job()
        except BaseException as error:
            # Kept, not swallowed: every later event of this stream raises it at its waiter.
            state.failure = error
        busy_s = time.perf_counter() - begun
        state.running, scope.event = "", None
    entry.event.complete(state.failure, busy_s)
