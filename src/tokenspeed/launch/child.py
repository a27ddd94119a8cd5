"""The child's side: take the start message, report, stop when asked, and never outlive the launcher.

A child is a fresh interpreter (``python -m``, not a fork: threads and locks of the launcher must not
be copied, and not multiprocessing's spawn: that imports the launcher's main module and adds a helper
process of its own). It inherits one end of a channel, over which its start message comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import NoReturn, TypeVar

import attrs

from tokenspeed.launch.messages import Dial, FromChild, LoadProgress, StartMessage, Stop, failure_of
from tokenspeed.launch.signals import SignalPipe, open_signal_pipe
from tokenspeed.telemetry.logs import Logs, start_logging

PR_SET_PDEATHSIG = 1
LOG_CLOSE_S = 0.5
"""How long a log that nobody reads may hold up the end of a process."""

S = TypeVar("S", bound=StartMessage)


@attrs.define(eq=False)
class ParentState:
    """Written under the parent's lock, but `ended`, which the main thread sets last."""

    on_stop: Callable[[], None] | None = None
    stopping: bool = False
    ended: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Parent:
    """The launcher, as its child sees it. The thread ``ts-launch`` receives its messages and notices its end.

    Outside `serving` nothing needs an orderly end: a `Stop` exits at once, and SIGTERM has its
    default effect.
    """

    channel: Connection
    lock: threading.Lock
    addresses: queue.SimpleQueue[str]
    pipe: SignalPipe
    logs: Logs
    state: ParentState = attrs.field(factory=ParentState)

    def report(self, message: FromChild) -> None:
        """Any thread. Nothing is sent to a launcher that is gone; its end reaches ``ts-launch``."""
        with self.lock, contextlib.suppress(OSError):
            self.channel.send(message)

    def address(self) -> str:
        """Block until the launcher has sent where to dial."""
        return self.addresses.get()

    @contextlib.contextmanager
    def serving(self, stop: Callable[[], None]) -> Generator[None, None, None]:
        """Until the end, a stop calls `stop`, on the thread ``ts-launch``. Main thread."""
        with self.pipe.catching(signal.SIGTERM):
            with self.lock:
                self.state.on_stop = stop
            yield

    @property
    def stopping(self) -> bool:
        """Whether the launcher or a signal has asked for the end."""
        return self.state.stopping

    def fail(self, exc: BaseException) -> NoReturn:
        """Write what was logged, report to the launcher (KM-33), and exit without finalization: no thread may hold
        the process (SS-4)."""
        self.logs.close(timeout_s=LOG_CLOSE_S)
        self.report(failure_of(exc))
        _exit(1)

    def listen(self) -> None:
        """Body of ``ts-launch``."""
        while True:
            ready = wait([self.channel, self.pipe.fileno()])
            if self.state.ended:
                return
            if self.pipe.fileno() in ready and self.pipe.taken():
                self._stop()
            if self.channel in ready:
                try:
                    message = self.channel.recv()
                except (EOFError, OSError):
                    os._exit(1)  # the launcher is gone: nobody would stop this process later
                self._handle(message)

    def end(self, listener: threading.Thread) -> None:
        """The work is done: join ``ts-launch``, close the channel."""
        self.state.ended = True
        self.pipe.wake()
        listener.join()
        self.channel.close()
        self.pipe.close()
        self.logs.close()

    def _handle(self, message: object) -> None:
        match message:
            case Dial(address=address):
                self.addresses.put(address)
            case Stop():
                self._stop()

    def _stop(self) -> None:
        with self.lock:
            self.state.stopping = True
            on_stop = self.state.on_stop
        if on_stop is None:
            self._exit(0)
        on_stop()

    def _exit(self, status: int) -> NoReturn:
        self.logs.close(timeout_s=LOG_CLOSE_S)
        _exit(status)


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@attrs.frozen(eq=False)
class ChannelProgress:
    """`checkpoint.progress.Progress` that shows in the launcher's terminal."""

    parent: Parent

    def step(self, what: str, done: int, total: int) -> None:
        self.parent.report(LoadProgress(what=what, done=done, total=total))


def run_child(argv: Sequence[str], kind: type[S], work: Callable[[Parent, S], None]) -> int:
    """Be a child of the launcher that gave ``argv = [program, channel descriptor, launcher's pid]``.

    Args:
        kind: of the start message this program takes.
        work: everything this process is for, on the main thread. What it raises ends the process
            with status 1, reported to the launcher.
    Returns: the exit status of an orderly end.
    """
    die_with(int(argv[2]))
    faulthandler.enable()
    # A terminal sends its interrupt to the launcher, which stops its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Connection(int(argv[1]))
    try:
        start = channel.recv()
    except EOFError:
        os._exit(1)
    parent = Parent(
        channel=channel,
        lock=threading.Lock(),
        addresses=queue.SimpleQueue(),
        pipe=open_signal_pipe(),
        logs=start_logging(start.settings.log, own_process=True),
    )
    listener = threading.Thread(target=parent.listen, name="ts-launch", daemon=True)
    listener.start()
    try:
        if not isinstance(start, kind):
            raise TypeError(f"expected a {kind.__name__}, got {type(start).__name__}")  # noqa: TRY301 - reported below
        work(parent, start)
    except BaseException as exc:
        parent.fail(exc)
    parent.end(listener)
    return 0


def die_with(launcher: int) -> None:
    """Let the kernel end this process when the launcher is gone, however it went."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != launcher:
        os._exit(1)
