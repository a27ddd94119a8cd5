"""SIGUSR1 to a rank's process: describe the engine's state in the log."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import attrs


@attrs.define(eq=False)
class Ending:
    """Writer: the thread that closes."""

    over: bool = False


@contextmanager
def dumping_on_signal(ask: Callable[[], None]) -> Generator[None, None, None]:
    """Call `ask` for every SIGUSR1, on the thread ``ts-signal``. Enter and leave on the main thread.

    The signal is blocked in all threads, see `dump_signal_blocked`, and waited for by one: what `ask` takes
    locks for is never interrupted by it.
    """
    ending = Ending()

    def wait() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            if ending.over:
                return
            ask()

    thread = threading.Thread(target=wait, name="ts-signal", daemon=True)
    with dump_signal_blocked():  # for this thread in any case: `sigwait`, and the end below, count on it
        thread.start()
    try:
        yield
    finally:
        ending.over = True
        if thread.ident is not None:
            signal.pthread_kill(thread.ident, signal.SIGUSR1)
        thread.join()


@contextmanager
def dump_signal_blocked() -> Generator[None, None, None]:
    """A process started within begins with the signal blocked, in every thread that libraries start when they are
    imported, too: any thread without it would take the signal, and end the process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
