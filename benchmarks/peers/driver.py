"""The other end of `round_peers`: commands from standard input, answers to standard output. Standard library only."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Protocol

REPEATS = 7
TOKEN = 7
VOCAB = 32000


class Scheduler(Protocol):
    """A peer's scheduler with `n` running requests."""

    def round(self) -> int:
        """One decode round for all of them. Returns nanoseconds of it that were not the scheduler's."""
        ...


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def serve(
    engine: str,
    prepare: Callable[[int, int, int, int], Scheduler],
    long_prompt: Callable[[int, int, int], tuple[int, int, int, int]],
) -> None:
    """Answer commands until standard input ends.

    Args:
        prepare: ``(n, context, block, rounds)``.
        long_prompt: ``(block, length, seed)``: nanoseconds of submit and admit on a miss, and on a hit.
    """
    # What a peer prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    say({"engine": engine})
    scheduler: Scheduler | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if "prepare" in command:
            want = command["prepare"]
            scheduler = None
            scheduler = prepare(want["n"], want["context"], want["block"], want["rounds"])
            gc.collect()
            gc.freeze()
            say({})
        elif "rounds" in command:
            assert scheduler is not None
            say(timed(scheduler, command["rounds"]))
        else:
            want = command["long_prompt"]
            columns = zip(*(long_prompt(want["block"], want["length"], seed) for seed in range(REPEATS)), strict=True)
            say(dict(zip(("submit", "admit", "hit_submit", "hit_admit"), map(list, columns), strict=True)))


def timed(scheduler: Scheduler, rounds: int) -> dict[str, list[int]]:
    wall, cpu = [], []
    gc.disable()
    for _ in range(rounds):
        started_cpu, started = time.thread_time_ns(), time.perf_counter_ns()
        other = scheduler.round()
        wall.append(time.perf_counter_ns() - started - other)
        cpu.append(time.thread_time_ns() - started_cpu - other)
    gc.enable()
    return {"wall": wall, "cpu": cpu}
