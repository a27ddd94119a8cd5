"""The other end of `cpu_peers`: commands from standard input, answers to standard output. Standard library only."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

Ids = list[int]
LOWEST_ID, HIGHEST_ID = 1000, 20000
"""Ordinary words of the vocabularies of the models measured; no special token."""


class Bench(Protocol):
    """What an engine can do on command; each returns seconds."""

    def decode(self, batch: int, context: int, steps: int, *, sampled: bool) -> float:
        """One step of `batch` rows whose contexts are `context` tokens on average."""
        ...

    def prefill(self, prompt: int) -> float:
        """From a prompt of so many tokens, never seen before, to its first token."""
        ...

    def warm(self, shared: int, new: int) -> float:
        """The same where the first `shared` tokens were in an earlier prompt."""
        ...


@dataclass
class Prompts:
    """Random token ids; two engines with the same seed get the same prompts."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    kept: dict[tuple[int, int], list[Ids]] = field(default_factory=dict)

    def fresh(self, length: int) -> Ids:
        return [self.rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)]

    def same(self, count: int, length: int) -> list[Ids]:
        """The prompts given out before for these numbers."""
        return self.kept.setdefault((count, length), [self.fresh(length) for _ in range(count)])


@dataclass
class Generating:
    """A bench over an engine that batches whole prompts and caches prefixes.

    A decode step is what further tokens of prompts that were seen before cost: almost nothing of them
    is computed again, so that the difference of two runs is decode steps alone.
    """

    generate: Callable[[list[Ids], int, bool], object]
    prompts: Prompts = field(default_factory=Prompts)

    def _seconds(self, prompts: list[Ids], tokens: int, *, sampled: bool = False) -> float:
        start = time.perf_counter()
        self.generate(prompts, tokens, sampled)
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int, *, sampled: bool) -> float:
        prompts = self.prompts.same(batch, context - steps // 2)
        self._seconds(prompts, 1)
        first = self._seconds(prompts, 1, sampled=sampled)
        return max(self._seconds(prompts, 1 + steps, sampled=sampled) - first, 1e-9) / steps

    def prefill(self, prompt: int) -> float:
        return self._seconds([self.prompts.fresh(prompt)], 1)

    def warm(self, shared: int, new: int) -> float:
        before = self.prompts.same(1, shared)[0]
        self._seconds([before + self.prompts.fresh(new)], 1)
        return self._seconds([before + self.prompts.fresh(new)], 1)


def serve(engine: str, bench: Callable[[], Bench]) -> None:
    """Load, say hello, and answer commands until standard input ends.

    A command is ``{"call": name, "with": {...}}``, its answer ``{"seconds": x}``; or
    ``{"unsupported": true}`` for what raises NotImplementedError.
    """
    # What an engine prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    begun = time.perf_counter()
    made = bench()
    say({"engine": engine, "ready_s": round(time.perf_counter() - begun, 2)})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            say({"seconds": getattr(made, command["call"])(**command["with"])})
        except NotImplementedError:
            say({"unsupported": True})
