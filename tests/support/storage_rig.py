"""Storage workers over toy host memory: two cache groups, a store of a test's choice, and a counted wakeup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import attrs
import numpy as np

from tokenspeed.control.wakeup import MonotonicClock
from tokenspeed.plane.operations import WeightsSource
from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.results import StorageDone
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.storage import HostBytes, HostRegion, StorageBackend, StorageTraffic
from tokenspeed.settings.model import StorageKind, StorageSettings
from tokenspeed.storage.executor import StorageWorkers
from tokenspeed.storage.factory import group_schemas, host_regions, open_storage
from tokenspeed.storage.identity import PayloadFacts
from tokenspeed.telemetry.meters import NullMeter

GROUPS = (
    CacheGroupSpec(name="full", block_tokens=4, layers=3),
    CacheGroupSpec(name="window", kind="window", block_tokens=8, window_tokens=16, layers=2),
)
BLOCKS = 64
PATIENT_S = 20.0
"""Longer than anything here takes."""


def toy_blocks() -> tuple[HostBytes, ...]:
    """uint8 ``[blocks, layers, layer_bytes]`` by group, as the device build hands it out."""
    return (np.zeros((BLOCKS, 3, 40), dtype=np.uint8), np.zeros((BLOCKS, 2, 100), dtype=np.uint8))


def facts(**changes: object) -> PayloadFacts:
    base = PayloadFacts(
        model="m", numerics="n", dtype="float32", page_tokens=4, groups=group_schemas(GROUPS, toy_blocks())
    )
    return attrs.evolve(base, **changes)  # type: ignore[arg-type]


@attrs.define(eq=False)
class CountingWakeup:
    changed: threading.Condition = attrs.field(factory=threading.Condition)
    sets: int = 0

    def set(self) -> None:
        with self.changed:
            self.sets += 1
            self.changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        raise NotImplementedError


@attrs.define(eq=False)
class NotingMeter(NullMeter):
    noted: list[StorageTraffic] = attrs.field(factory=list)

    def storage(self, traffic: StorageTraffic) -> None:
        self.noted.append(traffic)

    def total(self, name: str) -> float:
        return sum(getattr(traffic, name) for traffic in self.noted)


@attrs.define(eq=False)
class StoreRig:
    workers: StorageWorkers
    regions: tuple[HostRegion, ...]
    wakeup: CountingWakeup
    meter: NotingMeter
    ids: int = 0
    done: dict[int, StorageDone] = attrs.field(factory=dict)
    cancelled: list[int] = attrs.field(factory=list)
    pressure: float = 0.0

    def fill(self, block: int, value: int, *, group: int = 0) -> None:
        self.regions[group].blocks[block] = value

    def content(self, block: int, *, group: int = 0) -> set[int]:
        return set(self.regions[group].blocks[block].tolist())

    def start(self, verb: StorageVerb, names: list[str], blocks: list[int] | None = None, *, group: int = 0) -> int:
        self.ids += 1
        keys = tuple(group.to_bytes(2, "little") + name.encode() for name in names)
        self.workers.submit([StorageOp(op_id=self.ids, verb=verb, keys=keys, host_blocks=tuple(blocks or ()))])
        return self.ids

    def cancel(self, op_id: int) -> None:
        self.workers.submit([StorageOp(op_id=op_id, verb=StorageVerb.CANCEL, keys=())])

    def look(self) -> None:
        report = self.workers.report()
        self.pressure = report.pressure
        self.cancelled += report.cancelled
        for done in report.completed:
            assert done.op_id not in self.done
            self.done[done.op_id] = done

    def until(self, holds: Callable[[], bool]) -> None:
        """Look after every wake-up, as a control thread does, until `holds`."""
        until_s = time.monotonic() + PATIENT_S
        seen = -1
        while True:
            self.look()
            if holds():
                return
            with self.wakeup.changed:
                seen, before = self.wakeup.sets, seen
                if seen == before and not self.wakeup.changed.wait(until_s - time.monotonic()):
                    raise AssertionError(f"not within {PATIENT_S:g} s: {self.done}, {self.workers.desk.state.open}")

    def outcome(self, op_id: int) -> tuple[bool, ...]:
        self.until(lambda: op_id in self.done)
        return self.done[op_id].outcomes

    def put(self, names: list[str], blocks: list[int], *, group: int = 0) -> tuple[bool, ...]:
        return self.outcome(self.start(StorageVerb.PUT, names, blocks, group=group))

    def get(self, names: list[str], blocks: list[int], *, group: int = 0) -> tuple[bool, ...]:
        return self.outcome(self.start(StorageVerb.GET, names, blocks, group=group))

    def query(self, names: list[str], *, group: int = 0) -> tuple[bool, ...]:
        return self.outcome(self.start(StorageVerb.QUERY, names, group=group))


@contextmanager
def storing(
    backend: StorageBackend,
    *,
    weights: str = "w",
    weights_of: Callable[[WeightsSource, str], str] = lambda _, over: over + "+",
    payload: PayloadFacts | None = None,
    blocks: tuple[HostBytes, ...] | None = None,
    **settings: object,
) -> Generator[StoreRig, None, None]:
    """A store with workers; long limits unless `settings` has others."""
    regions = host_regions(GROUPS, blocks or toy_blocks())
    wakeup, meter = CountingWakeup(), NotingMeter()
    base = StorageSettings(backend=StorageKind.PART, timeout_s=PATIENT_S, shutdown_s=PATIENT_S)
    workers = open_storage(
        attrs.evolve(base, **settings),  # type: ignore[arg-type]
        payload or facts(),
        regions,
        backend,
        weights=weights,
        weights_of=weights_of,
        clock=MonotonicClock(),
        meter=meter,
        wakeup=wakeup,
    )
    try:
        yield StoreRig(workers=workers, regions=regions, wakeup=wakeup, meter=meter)
    finally:
        workers.close()
