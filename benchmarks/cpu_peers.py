"""Engines and servers in processes of their own, each under the interpreter that has it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import attrs

FOLDER = Path(__file__).parent / "peers"
SOURCES = Path(__file__).parents[1] / "src"
READY_S = 900.0
STOP_S = 30.0
OURS = "tokenspeed"


@attrs.frozen(kw_only=True)
class Spec:
    """How to start one engine in one mode.

    Attributes:
        driver: command line of its driver in `peers`; see `peers/engine_driver.py`.
        server: command line of its HTTP server without the port; empty: it has none here.
        environment: of the server, beside this process's own.
    """

    engine: str
    mode: str
    driver: tuple[str, ...]
    server: tuple[str, ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})


@attrs.frozen(kw_only=True, eq=False)
class Driven:
    """An engine that waits for commands; it uses no processor meanwhile."""

    engine: str
    mode: str
    process: subprocess.Popen[str]

    @property
    def ours(self) -> bool:
        return self.engine.startswith(OURS)

    def seconds(self, call: str, **arguments: object) -> float | None:
        """What `peers.engine_driver.Bench.call` returns; None: this engine cannot do that."""
        answer = _answer(self.process, {"call": call, "with": arguments})
        if not answer:
            raise SystemExit(f"{self.engine} {self.mode}: the driver ended with {self.process.wait()}")
        taken: float | None = answer.get("seconds")
        return taken


@contextmanager
def open_engines(specs: Sequence[Spec], log: Path, nice: int) -> Iterator[tuple[Driven, ...]]:
    """Start the drivers one after the other; what they print goes to `log`. One that fails is left out."""
    with ExitStack() as closing:
        opened = []
        words = closing.enter_context(log.open("a"))
        for spec in specs:
            process = subprocess.Popen(
                spec.driver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True, env=_environment()
            )
            closing.enter_context(process)
            hello = _answer(process, None)
            if not hello:
                print(f"{spec.engine} {spec.mode}: does not start, see {log}", file=sys.stderr)
                continue
            prefer(process.pid, nice)
            print(f"{hello['engine']} {spec.mode}: ready in {hello['ready_s']} s", file=sys.stderr)
            opened.append(Driven(engine=hello["engine"], mode=spec.mode, process=process))
        yield tuple(opened)


def _answer(process: subprocess.Popen[str], command: object) -> Mapping[str, object]:
    """The next line of a driver, after a command if there is one; empty: it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    if command is not None:
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
    return json.loads(process.stdout.readline() or "{}")


@attrs.frozen(kw_only=True, eq=False)
class Server:
    """A running HTTP server.

    Attributes:
        ready_s: from the start of its process to the first 200 of ``/health``.
    """

    engine: str
    mode: str
    process: subprocess.Popen[bytes]
    port: int
    ready_s: float

    def tell(self, what: signal.Signals) -> None:
        """All processes of its tree."""
        for pid in _tree(self.process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, what)

    def idle_cores(self, seconds: float = 2.0) -> float:
        """Processors that its tree uses while nobody asks anything of it."""
        before = _cpu_s(self.process.pid)
        time.sleep(seconds)
        return round((_cpu_s(self.process.pid) - before) / seconds, 2)

    def memory_mib(self) -> dict[str, int]:
        """By process of its tree: what it alone has in memory plus its share of what is shared."""
        found = {}
        for pid in _tree(self.process.pid):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found[f"{_program(words)} {pid}"] = int(re.findall(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[0]) >> 10
        return found


@contextmanager
def open_servers(specs: Sequence[Spec], log: Path, nice: int) -> Iterator[tuple[Server, ...]]:
    """Start the servers one after the other; they are told to stop at the end."""
    with ExitStack() as closing:
        opened = []
        words = closing.enter_context(log.open("a"))
        for spec in specs:
            port = _free_port()
            begun = time.perf_counter()
            process = subprocess.Popen(
                [*spec.server, "--port", str(port)],
                stdout=words,
                stderr=words,
                env={**_environment(), **spec.environment},
            )
            closing.callback(_stop, process)
            prefer(process.pid, nice)
            if not _until_ready(process, port, begun):
                print(f"{spec.engine} {spec.mode}: its server does not start, see {log}", file=sys.stderr)
                continue
            ready_s = round(time.perf_counter() - begun, 2)
            prefer(process.pid, nice)
            print(f"{spec.engine} {spec.mode}: serves after {ready_s} s", file=sys.stderr)
            opened.append(Server(engine=spec.engine, mode=spec.mode, process=process, port=port, ready_s=ready_s))
        yield tuple(opened)


@contextmanager
def others_stopped(server: Server, servers: Sequence[Server]) -> Iterator[None]:
    """All other servers are stopped meanwhile: an idle one may poll, and takes the cores of who is measured."""
    others = [other for other in servers if other is not server]
    for other in others:
        other.tell(signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            other.tell(signal.SIGCONT)
        for other in others:
            _until_ready(other.process, other.port, time.perf_counter())


def _cpu_s(root: int) -> float:
    used = 0
    for pid in _tree(root):
        with contextlib.suppress(OSError):
            used += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return used / os.sysconf("SC_CLK_TCK")


def _until_ready(process: subprocess.Popen[bytes], port: int, begun: float) -> bool:
    while process.poll() is None and time.perf_counter() - begun < READY_S:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def prefer(root: int, nice: int) -> None:
    """Give a tree of processes a priority, also among sessions: a server's children start their own.

    0: they keep theirs. Needs the right to raise priorities; what has ended in between does not matter.
    """
    for pid in _tree(root) if nice else ():
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    paths = [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended in between
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def _program(words: Sequence[str]) -> str:
    return words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
