"""What the frontend adds to an engine that costs nothing: CPU per token, and latency beyond the device's step.

A deployment is started with the simulated device and a fixed step time; a load client streams completions from it.
CPU is read from /proc for each process; the client runs in this process. The step times of the two parts differ:
for cost the device is never the limit (step 0), for latency it beats like a real one.

    python benchmarks/frontend_cost.py --streams 16 256
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from machine import machine

from tokenspeed.bench.client import Pace, Target, send_all
from tokenspeed.bench.data import Shape, made_jobs
from tokenspeed.bench.report import report_of

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROLES = {"frontend": "tokenspeed.launch.frontend_main", "rank": "tokenspeed.launch.rank_main"}


@attrs.frozen(kw_only=True)
class Deployment:
    url: str
    pids: dict[str, int]

    def cpu_s(self, role: str) -> float:
        """User and system time of the process and all its threads."""
        fields = Path(f"/proc/{self.pids[role]}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def deployment(*, step_ms: float, seats: int) -> Generator[Deployment, None, None]:
    settings = {
        "device.backend": "simulated",
        "simulated.step_ms": step_ms,
        "scheduler.max_num_seqs": seats,
        "scheduler.max_batched_tokens": 8192,
        "scheduler.max_waiting": 4 * seats,
        "server.port": 0,
        "log.level": "warning",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = subprocess.Popen([sys.executable, "-m", "tokenspeed", "serve", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"serving \S+ at (\S+)", line):
                yield Deployment(url=found[1], pids=_children(process.pid))
                break
        else:
            raise SystemExit("the deployment did not come up")
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.wait()


def _children(launcher: int) -> dict[str, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        for role, module in ROLES.items():
            if parent == launcher and module in command:
                found[role] = int(entry.name)
    return found


def measure(served: Deployment, *, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    jobs = made_jobs(Shape(prompt=32, output=tokens), streams * rounds, seed=streams)
    target = Target(url=served.url, model="SmolLM2-135M-Instruct")
    asyncio.run(send_all(jobs[:streams], target, Pace(concurrency=streams)))
    before = {role: served.cpu_s(role) for role in ROLES}
    report = report_of(asyncio.run(send_all(jobs, target, Pace(concurrency=streams))))
    if report.failed:
        raise SystemExit(f"{report.failed} requests failed: {report.faults}")
    spent = {role: served.cpu_s(role) - before[role] for role in ROLES}
    return {
        "streams": streams,
        "tokens": report.output_tokens,
        "tokens_per_s": report.output_tokens_per_s,
        **{f"{role}_us_per_token": 1e6 * spent[role] / report.output_tokens for role in ROLES},
        "itl_ms": attrs.asdict(report.itl_ms),
        "ttft_ms": attrs.asdict(report.ttft_ms),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="requests per stream")
    parser.add_argument("--step-ms", type=float, default=25.0, help="of the device in the latency part")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for step_ms in (0.0, options.step_ms):
        with deployment(step_ms=step_ms, seats=max(options.streams)) as served:
            for streams in options.streams:
                row = {
                    "step_ms": step_ms,
                    **measure(served, streams=streams, tokens=options.tokens, rounds=options.rounds),
                }
                rows.append(row)
                print(
                    f"step {step_ms:g} ms, {streams} streams: {row['tokens_per_s']:.0f} tok/s, "
                    f"frontend {row['frontend_us_per_token']:.1f} us a token, rank {row['rank_us_per_token']:.1f}, "
                    f"between tokens p50 {row['itl_ms']['p50']:.2f} ms, mean {row['itl_ms']['mean']:.2f}"
                )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
