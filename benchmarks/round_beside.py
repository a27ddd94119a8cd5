"""What a round of the control thread costs beside a running forward, and alone.

    python benchmarks/round_beside.py [--n 64] [--rounds 60] [--threads 1 2] [--turns 3] [--json]

All are the whole loop (`EventLoop.round`) with `n` requests that decode at depth 1 on prompts of 64 tokens; the time in
which it waits for a result is left out.

    beside  the default model computes on the forward thread, with `threads` compute threads
    alone   a scripted data plane, which computes nothing, answers when as much time has passed
    at once the same, but it answers at once: rounds follow each other with everything in the processor's caches

The three take turns. A round that comes every 100 ms finds the caches cold, whether a forward ran meanwhile or
nothing did, so `alone` is what `beside` is compared with. ``cpu`` is the control thread's processor time, ``wall``
holds what the kernel gave its core to, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import attrs
import numpy as np
from machine import machine
from round_rig import DroppingLink, answer, clock, cpu_clock, quiet, request, tokens

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.compose.control import ControlContainer
from tokenspeed.compose.engine import SWITCH_INTERVAL_S
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.device.build import build_device_side
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.plane.ports import DataPlane, Ticket
from tokenspeed.plane.results import ForwardResult
from tokenspeed.settings.model import CacheSettings, DeviceSettings, SchedulerSettings, Settings
from tokenspeed.testing import ScriptedPlane

PROMPT = 64
SETTLE = 8


@attrs.define(eq=False)
class WaitsCounted:
    """A data plane that knows how long commits have waited, in ns of wall time."""

    inner: DataPlane
    pace_s: float = 0.0
    waited: int = 0

    def commit(self, ticket: Ticket) -> ForwardResult:
        begun = clock()
        try:
            time.sleep(self.pace_s)
            return self.inner.commit(ticket)
        finally:
            self.waited += clock() - begun

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@attrs.define(eq=False)
class Subject:
    loop: EventLoop
    plane: WaitsCounted
    wall: list[int] = attrs.field(factory=list)
    cpu: list[int] = attrs.field(factory=list)

    def run(self, rounds: int) -> None:
        with quiet():
            for at in range(SETTLE + rounds):
                waited, cpu, begun = self.plane.waited, cpu_clock(), clock()
                self.loop.round()
                wall, cpu = clock() - begun - (self.plane.waited - waited), cpu_clock() - cpu
                if at >= SETTLE:
                    self.wall.append(wall)
                    self.cpu.append(cpu)

    def figures(self) -> dict[str, float]:
        return {
            "cpu_us": round(statistics.median(self.cpu) / 1e3, 1),
            "wall_us": round(statistics.median(self.wall) / 1e3, 1),
        }


def settings_for(n: int, threads: int) -> Settings:
    return Settings(
        device=DeviceSettings(threads=threads, memory_gib=4.0),
        scheduler=SchedulerSettings(max_num_seqs=n, max_batched_tokens=1024, chunk_tokens=256),
        cache=CacheSettings(page_tokens=16),
    )


def measure(n: int, threads: int, rounds: int, turns: int) -> dict[str, object]:
    settings = settings_for(n, threads)
    checkpoint = open_checkpoint(resolve_model(settings.model, NoProgress()))
    with ExitStack() as opened:
        build = build_device_side(settings, checkpoint)
        wakeup = ThreadWakeup()
        real = open_data_plane(build.handle, wakeup)
        opened.callback(real.close)
        planes: dict[str, DataPlane] = {
            "beside": real,
            "alone": ScriptedPlane(answer=answer, keep_plans=False),
            "at_once": ScriptedPlane(answer=answer, keep_plans=False),
        }
        subjects: dict[str, Subject] = {}
        for name, plane in planes.items():
            link, counted = DroppingLink(), WaitsCounted(plane)
            box = ControlContainer(
                settings=settings, specs=build.specs, plane=counted, frontend=link, wakeup=ThreadWakeup()
            )
            loop, rng = box.loop(), np.random.default_rng(1)
            most = (turns + 1) * (rounds + SETTLE) + 64
            for i in range(n):
                link.inbox.append(request(f"request-{i:03d}", tokens(rng, PROMPT), max_new=most))
            subjects[name] = Subject(loop=loop, plane=counted)
            drive(loop, until=lambda loop=loop: loop.scheduler.sizes().decoding == n)
        for _ in range(turns):
            for name, subject in subjects.items():
                waited = subject.plane.waited
                subject.run(rounds)
                if name == "beside":
                    subjects["alone"].plane.pace_s = (subject.plane.waited - waited) / 1e9 / (rounds + SETTLE)
        pace_s = subjects["alone"].plane.pace_s
    figures = {name: subject.figures() for name, subject in subjects.items()}
    alone, beside = figures["alone"], figures["beside"]
    return {
        "n": n,
        "threads": threads,
        "pace_ms": round(1e3 * pace_s, 1),
        **{f"{name}_{key}": value for name, each in figures.items() for key, value in each.items()},
        "cpu_ratio": round(beside["cpu_us"] / alone["cpu_us"], 2),
        "wall_ratio": round(beside["wall_us"] / alone["wall_us"], 2),
    }


def drive(loop: EventLoop, *, until: Callable[[], bool]) -> None:
    while not until():
        loop.round()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a rank process
    found = [measure(args.n, threads, args.rounds, args.turns) for threads in args.threads]
    if args.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    print(machine())
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
