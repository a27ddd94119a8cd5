"""Which of several engines takes the next group of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from tokenspeed.errors import EngineDead
from tokenspeed.plane.messages import LoadReport

FULL_ABOVE = 0.5
QUEUE_WEIGHT = 6.0
"""Waiting requests weigh more the fuller the KV pool is above :data:`FULL_ABOVE`: they wait longer."""


class EngineView(Protocol):
    """What a router may look at."""

    @property
    def alive(self) -> bool: ...

    @property
    def load(self) -> LoadReport | None: ...

    @property
    def in_flight(self) -> int: ...


class Router(Protocol):
    def pick(self, engines: Sequence[EngineView]) -> int:
        """Index of the engine to use.

        Raises: EngineDead: none is alive.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class LeastLoaded:
    """The living engine with the smallest load.

    The load is the larger of what we sent and what the engine reports, so that a stale report hides
    nothing of our own; ties go to the engine we sent less to. Reports count only while every living engine
    has a fresh one: an engine that is silent must not look idle beside one that speaks.
    """

    def pick(self, engines: Sequence[EngineView]) -> int:
        living = [at for at, engine in enumerate(engines) if engine.alive]
        if not living:
            raise EngineDead("no engine is alive")
        loads = snapshots(engines, living)
        return min(living, key=lambda at: (_weight(engines[at], loads.get(at)), engines[at].in_flight, at))


def snapshots(engines: Sequence[EngineView], of: Sequence[int]) -> Mapping[int, LoadReport]:
    """Load by index of the engines `of`; of all of them or, if one's is missing or old, of none (FW-32)."""
    found = {at: load for at in of if (load := engines[at].load) is not None}
    return found if len(found) == len(of) else {}


def _weight(engine: EngineView, load: LoadReport | None) -> float:
    if load is None:
        return float(engine.in_flight)
    usage = load.active_blocks / load.total_blocks if load.total_blocks else 0.0
    held = max(engine.in_flight, load.running + load.waiting)
    return held + load.waiting * QUEUE_WEIGHT * max(0.0, usage - FULL_ABOVE)
