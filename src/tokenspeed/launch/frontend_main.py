"""The frontend's process: bind the engine wire, wait for the engines, serve HTTP until told to stop."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenspeed.checkpoint.sources import ResolvedModel
from tokenspeed.launch.child import Parent, run_child
from tokenspeed.launch.messages import Bound, Exiting, Ready, StartFrontend
from tokenspeed.plane.ports import EngineLink
from tokenspeed.settings.model import Settings
from tokenspeed.wire.zmq_frontend import bind_hub

YOUNG_OBJECTS = 20_000
SWITCH_INTERVAL_S = 0.0005


class Server(Protocol):
    """What a frontend's process does with its server; see `compose.serving.HttpFrontend`."""

    def run(self) -> None: ...

    def stop(self) -> None: ...


class BuildServer(Protocol):
    """How a frontend's process gets its server; see `compose.serving.serve_http`.

    `connect` waits for the engines.
    """

    def __call__(
        self,
        settings: Settings,
        resolved: ResolvedModel,
        connect: Callable[[], Sequence[EngineLink]],
        sock: socket.socket,
        *,
        on_ready: Callable[[str], None],
        ranks_dir: str | None,
    ) -> Server: ...


def run_frontend(parent: Parent, start: StartFrontend, build: BuildServer) -> None:
    """Everything between the start message and the end of this process."""
    hub = bind_hub(engines=start.engines)
    try:
        parent.report(Bound(address=hub.address))
        with socket.socket(fileno=start.listener) as sock:
            server = build(
                start.settings,
                start.resolved,
                # Without a deadline: engines load for as long as they need, and the launcher watches them.
                hub.wait_for_engines,
                sock,
                on_ready=lambda url: parent.report(Ready(url=url)),
                ranks_dir=None if start.metrics is None else start.metrics.directory,
            )
            with parent.serving(server.stop):
                server.run()
        if not parent.stopping:
            parent.report(Exiting(why="the HTTP server ended"))
    finally:
        hub.close()


def frontend_process(build: BuildServer, argv: Sequence[str]) -> int:
    """The process's exit status; `build` makes its server."""
    return run_child(argv, StartFrontend, lambda parent, start: run_frontend(parent, start, build))


def settle() -> None:
    """What start-up made stays: collections leave it out, and pass what one batch of outputs makes and drops again.

    A collection holds up every stream; the default threshold starts several a batch, and those that walk the whole
    heap take a tenth of a second. One of `YOUNG_OBJECTS` takes 4 to 12 ms and finds little: requests leave no cycles,
    so what grows up to the threshold is what lives, about 170 objects a stream. The wire's thread gives way to the
    streams' sooner than Python's 5 ms, which a stream would wait for at each of its writes. Changes the whole process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def main() -> int:
    def build(
        settings: Settings,
        resolved: ResolvedModel,
        connect: Callable[[], Sequence[EngineLink]],
        sock: socket.socket,
        *,
        on_ready: Callable[[str], None],
        ranks_dir: str | None,
    ) -> Server:
        # Imported when the start message is there: a fault in it is reported to the launcher like any other.
        from tokenspeed.compose.serving import serve_http

        server = serve_http(settings, resolved, connect, sock, on_ready=on_ready, ranks_dir=ranks_dir)
        settle()
        return server

    return frontend_process(build, sys.argv)


if __name__ == "__main__":
    sys.exit(main())
