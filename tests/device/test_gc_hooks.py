"""Freezing the start-up heap, and full collections by count of forwarded rounds."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import attrs
import pytest
from device_doubles import CountingWakeup, FakeHandle

from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.gc_hooks import (
    FULL_COLLECTION_INTERVAL,
    NEVER,
    AutomaticCollection,
    GcHooks,
    freeze_startup_heap,
)


@attrs.define(eq=False)
class RecordingCollector:
    """`Collector` that notes its calls and the thread of each."""

    log: list[tuple[object, ...]] = attrs.field(factory=list)
    threads: list[str] = attrs.field(factory=list)

    def collect(self) -> int:
        self.log.append(("collect",))
        self.threads.append(threading.current_thread().name)
        return 0

    def freeze(self) -> None:
        self.log.append(("freeze",))

    def get_threshold(self) -> tuple[int, int, int]:
        return (701, 11, 12)

    def set_threshold(self, threshold0: int, threshold1: int, threshold2: int, /) -> None:
        self.log.append(("set_threshold", threshold0, threshold1, threshold2))


@pytest.mark.contract("DP-86")
def test_freezing_collects_freezes_and_raises_the_oldest_threshold_only() -> None:
    collector = RecordingCollector()
    freeze_startup_heap(collector)
    assert collector.log == [("collect",), ("freeze",), ("set_threshold", 701, 11, NEVER)]


CHILD = """
import gc
from tokenspeed.device.gc_hooks import InterpreterCollector, freeze_startup_heap

survivors = [[i] for i in range(200_000)]
before = len(gc.get_objects())
freeze_startup_heap(InterpreterCollector())
after = len(gc.get_objects())
young = [generation["collections"] for generation in gc.get_stats()]
for _ in range(30_000):
    cycle = []
    cycle.append(cycle)
now = [generation["collections"] for generation in gc.get_stats()]
print(before, after, gc.get_freeze_count(), *(a - b for a, b in zip(now, young)), *gc.get_threshold())
"""


@pytest.mark.contract("DP-85", "DP-86", "DP-90")
def test_after_the_freeze_a_full_collection_walks_little_and_young_generations_stay_automatic() -> None:
    answer = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=120)
    before, after, frozen, gen0, gen1, gen2, threshold0, threshold1, threshold2 = map(int, answer.stdout.split())
    assert before > 200_000
    assert after < 1_000  # what a collection of the oldest generation would walk
    assert frozen > 200_000
    assert gen0 > 0
    assert gen1 > 0
    assert gen2 == 0
    assert (threshold0, threshold1, threshold2) == (*gc.get_threshold()[:2], NEVER)


@pytest.mark.contract("DP-87", "RA-45")
def test_a_full_collection_runs_on_the_forward_thread_after_each_interval_of_forwarded_rounds() -> None:
    collector = RecordingCollector()
    hooks = GcHooks(collector=collector, interval=5)
    handle = FakeHandle(body=lambda operation: hooks.note_forwarded() if operation == "note_forwarded" else None)
    handle.gate.set()
    plane = open_data_plane(handle, CountingWakeup())
    for count in range(1, 13):
        plane.note_forwarded()
        plane.idle_forward()  # rounds that forwarded nothing do not count
        assert len(collector.log) == count // 5
    plane.close()
    assert collector.threads == ["ts-forward"] * 2


@pytest.mark.contract("DP-87")
def test_the_default_interval_is_the_contracts() -> None:
    assert GcHooks().interval == FULL_COLLECTION_INTERVAL == 10_000


def test_a_host_program_keeps_its_own_garbage_collection() -> None:
    before, counts = gc.get_threshold(), gc.get_freeze_count()
    hooks = AutomaticCollection()
    for _ in range(20_000):
        hooks.note_forwarded()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, counts)
