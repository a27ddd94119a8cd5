"""Signals as bytes to read: nothing happens in a handler, everything afterwards, in the owner's loop (SS-10)."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

import attrs

from tokenspeed.wire.waker import Waker, open_waker


def _noted(signum: int, frame: FrameType | None) -> None:
    """The interpreter has put the signal's number into the pipe already; nothing is left to do here."""


@attrs.frozen(eq=False)
class SignalPipe:
    """Becomes readable when a signal came; `fileno` is what to wait on."""

    waker: Waker

    def fileno(self) -> int:
        return self.waker.fileno()

    def taken(self) -> int:
        """How many signals (and `wake`s) came since the last call."""
        with contextlib.suppress(BlockingIOError):
            return len(self.waker.readable.recv(4096))
        return 0

    def wake(self) -> None:
        """Any thread: make the pipe readable as a signal would."""
        self.waker.wake()

    @contextlib.contextmanager
    def catching(self, *wanted: signal.Signals) -> Generator[None, None, None]:
        """Catch `wanted` until the end; a signal that is ignored stays ignored (nohup, background jobs).

        Signals belong to the main thread: on another one nothing is caught.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {name: signal.getsignal(name) for name in wanted if signal.getsignal(name) is not signal.SIG_IGN}
        old_fd = signal.set_wakeup_fd(self.waker.writable.fileno(), warn_on_full_buffer=False)
        for name in before:
            signal.signal(name, _noted)
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)
            signal.set_wakeup_fd(old_fd)

    def close(self) -> None:
        self.waker.close()


def open_signal_pipe() -> SignalPipe:
    return SignalPipe(open_waker())


@contextlib.contextmanager
def interrupted_by(*wanted: signal.Signals) -> Generator[None, None, None]:
    """Until the end, let `wanted` raise KeyboardInterrupt, so that long work unwinds and tidies up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.signal(name, signal.default_int_handler) for name in wanted}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
