"""Garbage collection of a serving process: full collections at moments the ranks agree on.

A collection of the oldest generation halts every Python thread while it walks what start-up left
alive, and one rank's halt is everyone's. So start-up's survivors are frozen once, the interpreter
no longer starts full collections itself, and the data plane starts them on its forward thread each
time a fixed number of rounds has forwarded, a count on which all ranks agree. The two young
generations stay automatic.
"""

from __future__ import annotations

import gc
from typing import Protocol

import attrs

FULL_COLLECTION_INTERVAL = 10_000
"""Forwarded rounds between two full collections."""

NEVER = 2**31 - 1
"""A threshold of the oldest generation that is not reached (it is a C int)."""


class Collector(Protocol):
    """The part of the module `gc` used here."""

    def collect(self) -> int: ...
    def freeze(self) -> None: ...
    def get_threshold(self) -> tuple[int, int, int]: ...
    def set_threshold(self, threshold0: int, threshold1: int, threshold2: int, /) -> None: ...


@attrs.frozen(eq=False)
class InterpreterCollector:
    """The garbage collector of this process."""

    def collect(self) -> int:
        return gc.collect()

    def freeze(self) -> None:
        gc.freeze()

    def get_threshold(self) -> tuple[int, int, int]:
        return gc.get_threshold()

    def set_threshold(self, threshold0: int, threshold1: int, threshold2: int, /) -> None:
        gc.set_threshold(threshold0, threshold1, threshold2)


def freeze_startup_heap(collector: Collector) -> None:
    """Collect once, exempt the survivors, and keep the interpreter from full collections (DP-86).

    Changes the whole process: for rank processes of the launcher, never for a host program.
    """
    collector.collect()
    collector.freeze()
    young, middle, _ = collector.get_threshold()
    collector.set_threshold(young, middle, NEVER)


class RoundCounter(Protocol):
    """Is told of every forwarded round, on ``ts-forward``."""

    def note_forwarded(self) -> None: ...


@attrs.frozen(eq=False)
class AutomaticCollection:
    """The interpreter decides, as in a host program that runs the engine inside itself."""

    def note_forwarded(self) -> None:
        return None


@attrs.define(eq=False)
class ForwardedRounds:
    """Writer: GcHooks."""

    count: int = 0


@attrs.frozen(kw_only=True, eq=False)
class GcHooks:
    """Starts the full collections that `freeze_startup_heap` took from the interpreter (DP-87)."""

    collector: Collector = attrs.field(factory=InterpreterCollector)
    interval: int = FULL_COLLECTION_INTERVAL
    rounds: ForwardedRounds = attrs.field(factory=ForwardedRounds)

    def note_forwarded(self) -> None:
        self.rounds.count += 1
        if self.rounds.count % self.interval == 0:
            self.collector.collect()
