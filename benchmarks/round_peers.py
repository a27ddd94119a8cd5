"""Other schedulers in interpreters of their own, driven over pipes: one JSON line a command, one an answer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

FOLDER = Path(__file__).parent / "peers"


@attrs.frozen(kw_only=True, eq=False)
class Peer:
    """A driver of `benchmarks/peers` that waits for commands; it uses no processor meanwhile."""

    engine: str
    process: subprocess.Popen[str]

    def prepare(self, *, n: int, context: int, block: int, rounds: int) -> None:
        """A scheduler with `n` requests that decode, each with a prompt of `context` tokens."""
        self._ask({"prepare": {"n": n, "context": context, "block": block, "rounds": rounds}})

    def rounds(self, count: int) -> tuple[list[int], list[int]]:
        """Wall and CPU nanoseconds of `count` decode rounds."""
        got = self._ask({"rounds": count})
        return got["wall"], got["cpu"]

    def long_prompt(self, *, block: int, length: int) -> Mapping[str, float]:
        """Microseconds: ``submit_us``, ``admit_us`` on a miss, ``hit_submit_us``, ``hit_admit_us``."""
        figures: Mapping[str, float] = self._ask({"long_prompt": {"block": block, "length": length}})
        return figures

    def _ask(self, command: object) -> dict:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine}: the driver ended with {self.process.wait()}")
        return json.loads(line)


@contextmanager
def open_peers(pythons: Mapping[str, str | None]) -> Iterator[tuple[Peer, ...]]:
    """Those of `pythons` (driver's file name without suffix: interpreter) that are given and start."""
    with ExitStack() as closing:
        peers = []
        for driver, python in pythons.items():
            if python is None:
                continue
            process = subprocess.Popen(
                [python, str(FOLDER / f"{driver}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            closing.enter_context(process)
            hello = json.loads(process.stdout.readline() or "{}") if process.stdout else {}
            if "engine" in hello:
                peers.append(Peer(engine=hello["engine"], process=process))
            else:
                print(f"{driver}: does not start under {python}")
        yield tuple(peers)
