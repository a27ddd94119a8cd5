"""The real SMG gateway and engines under it, as processes of their own, for tests.

The gateway binds the engine wire; engines are what ``tokenspeed serve --headless`` starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
import httpx
from source_tree import ROOT

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.resolved import CheckpointKind, ResolvedModel
from tokenspeed.frontend.text.tokenizer_files import write_tokenizer_folder

MODEL = "tiny-llama"
INSTALLED = importlib.util.find_spec("smg") is not None
REQUIRED = os.environ.get("TOKENSPEED_REQUIRE_SMG") == "1"
MISSING = "the gateway is not installed: pip install -c constraints.txt -e '.[smg]'"
PATIENCE_S = 20.0
START_S = 120.0
ANSWER_S = 90.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

T = TypeVar("T")


def until(look: Callable[[], T], what: str, *, within_s: float = PATIENCE_S) -> T:
    """Look at another process, which cannot tell, until it shows something; AssertionError once the time is over."""
    pause, deadline_s = threading.Event(), time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        pause.wait(0.05)
    raise AssertionError(f"{what}: not within {within_s:g} s")


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports of 127.0.0.1 that the kernel gives to nobody else meanwhile; another process may listen on them."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            sock = held.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
        yield ports


def model_folder(parent: Path, name: str = MODEL) -> Path:
    """What the gateway reads of the model ``random:NAME``."""
    resolved = ResolvedModel(kind=CheckpointKind.RANDOM, path=None, name=name, served_name=name, origin=name)
    write_tokenizer_folder(open_checkpoint(resolved), parent / name)
    return parent / name


@attrs.define(eq=False)
class Process:
    """A process whose words go to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, words: str, *, within_s: float = PATIENCE_S) -> str:
        """The first line with `words` in it, once it is there."""

        def found() -> str | None:
            line = next((line for line in self.text.splitlines() if words in line), None)
            assert line or self.process.poll() is None, f"ended without saying {words!r}:\n{self.text[-3000:]}"
            return line

        return until(found, f"{words!r} in {self.log.name}", within_s=within_s)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, *, cwd: Path | None = None) -> Iterator[Process]:
    with log.open("wb") as words:
        process = subprocess.Popen(
            command, stdout=words, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=cwd, stdin=subprocess.DEVNULL
        )
    started = Process(process=process, log=log)
    try:
        yield started
    finally:
        started.end()


@attrs.frozen(kw_only=True, eq=False)
class Gateway:
    """A gateway.

    Attributes:
        addresses: of the handshake sockets, one for each engine.
    """

    process: Process
    url: str
    addresses: tuple[str, ...]
    http: httpx.Client

    @property
    def worker(self) -> str:
        return self.addresses[0]

    def ready(self, *engines: Process, within_s: float = START_S) -> None:
        """Wait until it would serve; AssertionError if it, or one of `engines`, ends before."""

        def look() -> bool:
            for process in (self.process, *engines):
                assert process.process.poll() is None, process.text[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return self.http.get("/readiness").status_code == 200
            return False

        until(look, "the gateway's readiness", within_s=within_s)

    def loads(self) -> list[dict[str, object]]:
        """One entry an engine, in the order of their addresses."""
        loads: list[dict[str, object]] = self.http.get("/get_loads").json()["loads"]
        return sorted(loads, key=lambda load: self.addresses.index(str(load["worker"])))

    def workers(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = self.http.get("/workers").json()["workers"]
        return found

    def in_flight(self) -> list[int]:
        """Requests the gateway has given to each worker and that have not ended."""
        return [int(str(worker["load"])) for worker in self.workers()]

    def operate(self, operation: str, **body: object) -> httpx.Response:
        """An operation of the engine's, through the gateway's RL routes."""
        (worker,) = self.workers()
        return self.http.post(f"/v1/rl/workers/{worker['id']}/engine/{operation}", json=body)


@contextlib.contextmanager
def gateway(scratch: Path, *arguments: str, engines: int = 1, servicer: str = "") -> Iterator[Gateway]:
    """Over the wires of `engines`, or over the gRPC servicer at the address `servicer`."""
    model_folder(scratch)
    with reserved_ports(2 + engines) as (http_port, metrics_port, *wire_ports):
        addresses = (f"grpc://{servicer}",) if servicer else tuple(f"tcp://127.0.0.1:{port}" for port in wire_ports)
        command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(http_port)]
        command += ["--prometheus-port", str(metrics_port), "--prometheus-host", "127.0.0.1"]
        command += ["--worker-urls", *addresses, "--backend", "tokenspeed", "--model-path", MODEL]
        command += ["--health-check-interval-secs", "1", "--shutdown-settle-secs", "0", *arguments]
        url = f"http://127.0.0.1:{http_port}"
        with (
            running(command, scratch / "gateway.log", cwd=scratch) as process,
            httpx.Client(base_url=url, timeout=ANSWER_S) as http,
        ):
            yield Gateway(process=process, url=url, addresses=addresses, http=http)


@contextlib.contextmanager
def engine(worker: str, log: Path, *arguments: str) -> Iterator[Process]:
    """``tokenspeed serve --headless`` under `worker`; returns at once."""
    command = [sys.executable, "-m", "tokenspeed", "serve", f"random:{MODEL}", "--headless"]
    command += ["--handshake-address", worker, "--threads", "1", "--memory-gib", "0.25", "--max-num-seqs", "4"]
    with running([*command, "--enable-log-requests", *arguments], log) as process:
        yield process


@attrs.frozen(kw_only=True, eq=False)
class Lane:
    """A gateway, ready, and the engine under it."""

    gateway: Gateway
    engine: Process
