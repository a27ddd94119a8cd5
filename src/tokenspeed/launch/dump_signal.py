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

    The signal is blocked in the calling thread, and so in those started from here on, and waited for by one
    thread: what `ask` takes locks for is never interrupted by it. Threads that started before must have it
    blocked, too, see `block_dump_signal`.
    """
    ending = Ending()

    def wait() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            if ending.over:
                return
            ask()

    block_dump_signal()
    thread = threading.Thread(target=wait, name="ts-signal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.over = True
        if thread.ident is not None:
            signal.pthread_kill(thread.ident, signal.SIGUSR1)
        thread.join()


def block_dump_signal() -> None:
    """For the calling thread and all that it starts. Without it the signal would end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
