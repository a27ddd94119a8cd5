"""A readable end that any thread can make ready: what a thread blocked in a poll is woken by."""

from __future__ import annotations

import contextlib
import socket

import attrs


@attrs.frozen(eq=False)
class Waker:
    """A pair of sockets: unlike a bare pipe, a write after `close` cannot hit a descriptor that was reused."""

    readable: socket.socket
    writable: socket.socket

    def fileno(self) -> int:
        """The end to poll for input."""
        return self.readable.fileno()

    def wake(self) -> None:
        """Any thread. Never blocks: a full buffer already holds a wake-up. After `close` it does nothing."""
        with contextlib.suppress(OSError):
            self.writable.send(b"\0")

    def drain(self) -> None:
        """The polling thread, before it looks at what it was woken for."""
        with contextlib.suppress(BlockingIOError):
            self.readable.recv(4096)

    def close(self) -> None:
        self.readable.close()
        self.writable.close()


def open_waker() -> Waker:
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    return Waker(readable, writable)
