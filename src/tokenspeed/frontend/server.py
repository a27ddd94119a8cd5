"""uvicorn on a socket that is already bound, started and stopped by an owner.

Installs no signal handlers. The socket comes bound, so that port 0 works and a port in use is known
before a model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
import weakref
from collections.abc import AsyncGenerator, Generator
from email.utils import formatdate

import attrs
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenspeed.errors import SettingsError
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.stream import PIECES

log = logging.getLogger("tokenspeed.http")

BACKLOG = 1024
KEEP_ALIVE_S = 30
CLOSING_S = 2
"""What connections get to take their last bytes, once every request has ended."""


def bind_socket(host: str, port: int, *, stalled_s: float) -> socket.socket:
    """A TCP socket bound to `host`:`port`; port 0 lets the kernel pick.

    Args:
        stalled_s: a connection whose peer takes none of the data it was sent is dropped after this.

    Raises: SettingsError: the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise SettingsError(f"server.host: cannot listen on {host}: {exc}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(stalled_s * 1000), 2**31 - 1))
        sock.bind(address)
    except OSError as exc:
        sock.close()
        key = "server.host" if exc.errno == errno.EADDRNOTAVAIL else "server.port"
        raise SettingsError(f"{key}: cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _DatedState(ServerState):
    """What every response begins with, made when one is sent: an idle server need not keep a date current."""

    def __init__(self, more: list[tuple[bytes, bytes]]) -> None:
        self._more, self._second, self._headers = more, -1, list[tuple[bytes, bytes]]()
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        second = int(time.time())
        if second != self._second:
            self._headers = [(b"date", formatdate(second, usegmt=True).encode()), *self._more]
            self._second = second
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """The base class begins with none."""


class _Pieces:
    """What uvicorn's `send` does for a piece of a chunked body that is not the last. A `BodyPieces`.

    The response keeps this one, so this one does not keep the response: both go when it ends.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)

    def takes(self) -> bool:
        cycle = self._cycle()
        return cycle is not None and cycle.chunked_encoding is True and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        cycle = self._cycle()
        if cycle is not None and not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with a short way for pieces of a body, and leaving nothing for a collection when it ends."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.scope["extensions"] = {PIECES: _Pieces(self.cycle)}  # type: ignore[dict-item]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # A connection that is reset while it idles would stay, with its last request, until its timer is due.
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        # asyncio's own transport holds this method of its own for as long as it lives; it reads no more.
        getattr(self.transport, "__dict__", {}).pop("_read_ready_cb", None)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers and without its ten wakes a second, telling when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        config.load()
        self.server_state = _DatedState(config.encoded_headers)
        self.accepting, self.leaving = asyncio.Event(), asyncio.Event()

    def leave(self) -> None:
        """Close the listening socket and idle connections, end when the requests have."""
        self.should_exit = True
        self.leaving.set()

    async def main_loop(self) -> None:
        await self.leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()


@attrs.frozen(kw_only=True, eq=False)
class HttpServer:
    """A running server. `stop` it on the loop that it runs on."""

    api: Api
    server: _Server
    task: asyncio.Task[None]
    address: str

    async def stop(self) -> None:
        """Refuse new work, let running requests finish, end what is left with ``abort``, close.

        Takes at most ``server.shutdown_timeout_s`` and a little; may be called more than once.
        """
        began = not self.api.state.draining
        self.api.drain()
        self.server.leave()
        limit_s, running = self.api.settings.shutdown_timeout_s, self.api.service.in_flight
        if began:
            log.info("shutting down: %s refuses connections; %d sequences have %g s", self.address, running, limit_s)
        done, _ = await asyncio.wait((self.task,), timeout=limit_s)
        if not done:
            log.warning("shutting down: %d sequences did not end in time and are aborted", self.api.service.in_flight)
            self.api.service.end_all()
            done, _ = await asyncio.wait((self.task,), timeout=CLOSING_S)
        if not done:
            self.task.cancel()
            await asyncio.wait((self.task,))

    async def closed(self) -> None:
        """Wait for the server's end; raises what ended it."""
        await asyncio.shield(self.task)


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, api: Api, sock: socket.socket) -> AsyncGenerator[HttpServer, None]:
    """Serve `app` on `sock`, which is closed at the end; accepts connections once entered."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",  # start and end are told by us, in words that name the address and the requests
        access_log=False,
        lifespan="off",
        interface="asgi3",
        http=_Protocol,
        ws="none",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=None,  # ours, see HttpServer.stop
    )
    server = _Server(config)
    address = address_of(sock)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="ts-http")
    started = asyncio.create_task(server.accepting.wait())
    try:
        await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # raises what kept it from starting
        running = HttpServer(api=api, server=server, task=task, address=address)
        try:
            yield running
        finally:
            await running.stop()
    finally:
        started.cancel()
        sock.close()
