"""A frontend's process with a server of a few lines: run as a script by the launcher under test."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from tokenspeed.checkpoint.sources import ResolvedModel
from tokenspeed.launch.frontend_main import frontend_process
from tokenspeed.plane.messages import EngineEvent, EngineGone, GenerateRequest, OutputBatch, frozen_tokens
from tokenspeed.plane.ports import EngineLink
from tokenspeed.settings.model import Settings


@attrs.define(eq=False)
class FakeServer:
    """Sends each engine a request at start and another one while it stops; writes down the answers."""

    conduct: str
    links: tuple[EngineLink, ...]
    sock: socket.socket
    on_ready: Callable[[str], None]
    scratch: Path
    stopping: threading.Event = attrs.field(factory=threading.Event)
    answered: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))

    def hear(self, event: EngineEvent) -> None:
        if isinstance(event, OutputBatch):
            self.note(f"answer {event.rids[0]} {event.output_ids[0]}")
            self.answered.release()
        if isinstance(event, EngineGone):
            self.note("engine gone")
            self.answered.release()

    def note(self, line: str) -> None:
        with (self.scratch / "frontend.log").open("a") as log:
            log.write(line + "\n")
        sys.stdout.write(f"frontend: {line}\n")  # the launcher's own output, inherited
        sys.stdout.flush()

    def ask(self, rid: str) -> None:
        for link in self.links:
            link.send(GenerateRequest(rid=rid, input_ids=frozen_tokens((7, 8))))
        for _ in self.links:
            assert self.answered.acquire(timeout=10.0)

    def run(self) -> None:
        (self.scratch / "frontend.pid").write_text(str(os.getpid()))
        for link in self.links:
            link.subscribe(self.hear)
        if self.conduct == "raise":
            raise OSError("the certificate is missing")
        if self.conduct == "crash-rank":
            self.links[0].send(GenerateRequest(rid="crash", input_ids=frozen_tokens((1,))))
        else:
            self.ask("start")
        host, port = self.sock.getsockname()[:2]
        self.on_ready(f"http://{host}:{port}")
        if self.conduct == "exit":
            return
        if self.conduct == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.stopping.wait()
        if self.conduct == "stubborn":
            threading.Event().wait()
        self.ask("drain")
        self.note("drained")

    def stop(self) -> None:
        self.note("stop")
        self.stopping.set()


def build(
    settings: Settings,
    resolved: ResolvedModel,
    connect: Callable[[], Sequence[EngineLink]],
    sock: socket.socket,
    *,
    on_ready: Callable[[str], None],
    ranks_dir: str | None,
) -> FakeServer:
    """What the frontend does is written in the model's served name."""
    scratch = Path(settings.model.cache_dir or ".")
    return FakeServer(resolved.served_name, tuple(connect()), sock, on_ready, scratch)


if __name__ == "__main__":
    sys.exit(frontend_process(build, sys.argv))
