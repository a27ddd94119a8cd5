"""Other schedulers in interpreters of their own, driven over pipes: one JSON line a command, one an answer."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import attrs

FOLDER = Path(__file__).parent / "peers"
ANSWER_S = 120.0
"""For each answer, the start among them: an import of torch from a cold disk takes half a minute."""
LEAVE_S = 5.0

LongPrompt: TypeAlias = Mapping[str, list[int]]
Answer = TypeVar("Answer")


class Lost(Exception):
    """A peer that ended, or did not answer in time."""


@attrs.frozen(kw_only=True, eq=False)
class Peer:
    """A driver of `benchmarks/peers` that waits for commands; it uses no processor meanwhile.

    `answers` is filled by a thread that ends with the process; at most one answer is under way.
    Every method raises `Lost`.
    """

    engine: str
    process: subprocess.Popen[str]
    answers: queue.SimpleQueue[str]
    limit_s: float

    def prepare(self, *, n: int, context: int, block: int, rounds: int) -> None:
        """A scheduler with `n` requests that decode, each with a prompt of `context` tokens."""
        self._ask({"prepare": {"n": n, "context": context, "block": block, "rounds": rounds}})

    def rounds(self, count: int) -> tuple[list[int], list[int]]:
        """Wall and CPU nanoseconds of `count` decode rounds."""
        got = self._ask({"rounds": count})
        return got["wall"], got["cpu"]

    def long_prompt(self, *, block: int, length: int) -> LongPrompt:
        """Nanoseconds of some repetitions: ``submit``, ``admit`` on a miss, ``hit_submit``, ``hit_admit``."""
        figures: LongPrompt = self._ask({"long_prompt": {"block": block, "length": length}})
        return figures

    def _ask(self, command: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except OSError as cause:
            raise Lost("does not take commands any more") from cause
        return answer(self.answers, self.limit_s)


@attrs.define(eq=False)
class Peers:
    """Those that have answered so far."""

    live: list[Peer] = attrs.field(factory=list)

    def each(self, ask: Callable[[Peer], Answer]) -> dict[str, Answer]:
        """Answers by engine. A peer that is lost is named, and left out from now on."""
        found = {}
        for peer in tuple(self.live):
            try:
                found[peer.engine] = ask(peer)
            except Lost as lost:
                say(f"{peer.engine}: {lost}; left out")
                peer.process.kill()
                self.live.remove(peer)
        return found


def answer(answers: queue.SimpleQueue[str], limit_s: float) -> dict[str, Any]:
    """Raises: Lost."""
    try:
        line = answers.get(timeout=limit_s)
    except queue.Empty:
        raise Lost(f"no answer in {limit_s:g} s") from None
    if not line:
        raise Lost("its driver has ended")
    got: dict[str, Any] = json.loads(line)
    return got


def say(text: str) -> None:
    """Progress; standard output is for figures."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def open_peers(pythons: Mapping[str, str | None], *, limit_s: float = ANSWER_S) -> Iterator[Peers]:
    """Those of `pythons` (driver's file name without suffix: interpreter) that are given and start."""
    with ExitStack() as closing:
        peers = Peers()
        for driver, python in pythons.items():
            if python is None:
                continue
            say(f"starting {driver}")
            try:
                peers.live.append(closing.enter_context(_driven(driver, python, limit_s)))
            except (Lost, OSError) as why:
                say(f"{driver}: does not start under {python}: {why}; left out")
        yield peers


@contextmanager
def _driven(driver: str, python: str, limit_s: float) -> Iterator[Peer]:
    process = subprocess.Popen(
        [python, str(FOLDER / f"{driver}.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, answers), name=f"answers of {driver}")
    reader.start()
    try:
        try:
            hello = answer(answers, limit_s)
        except Lost:
            process.kill()
            raise
        yield Peer(engine=hello["engine"], process=process, answers=answers, limit_s=limit_s)
    finally:
        _end(process)
        reader.join()


def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put("")


def _end(process: subprocess.Popen[str]) -> None:
    """Its commands end, and so should it; what a peer's own threads hold up is killed."""
    assert process.stdin is not None
    with suppress(OSError):  # it may have gone with a command unread
        process.stdin.close()
    try:
        process.wait(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
