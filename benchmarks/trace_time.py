"""What each plan of a recording took: on the host that submitted it, and on the device that computed it.

    python benchmarks/trace_time.py forward-1.json [rank1/forward-1.json ...]

A device works behind its host: what a plan launched may begin and end after the plan's range. So device
events are found by the number they share with the call that launched them, never by their time, and
count whole. The number is unique within a process only; a recording is one rank's process, and is read
by itself. A recording of the CPU alone has no device events.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
Thread: TypeAlias = tuple[int, int]


@attrs.define
class PlanTime:
    """One plan of one recording, in microseconds.

    Attributes:
        device_us: of all that it launched.
        behind_us: from the end of the host's range to the end of the last of it; 0: it ended within.
    """

    title: str
    begin_us: float
    host_us: float
    device_us: float = 0.0
    behind_us: float = 0.0

    @property
    def end_us(self) -> float:
        return self.begin_us + self.host_us


def plan_times(events: Sequence[dict[str, Any]]) -> list[PlanTime]:
    """The plans of one recording, in the order of their submission."""
    plans: dict[Thread, list[PlanTime]] = defaultdict(list)
    device: dict[int, list[dict[str, Any]]] = defaultdict(list)
    launches = []
    for event in (one for one in events if one.get("ph") == "X"):
        kind = event.get("cat")
        if kind == "user_annotation" and str(event["name"]).startswith("plan "):
            plan = PlanTime(title=str(event["name"]), begin_us=float(event["ts"]), host_us=float(event["dur"]))
            plans[event["pid"], event["tid"]].append(plan)
        elif kind in DEVICE:
            device[event["args"]["correlation"]].append(event)
        elif kind in LAUNCHES and "correlation" in event.get("args", {}):
            launches.append(event)
    for found in plans.values():
        found.sort(key=lambda plan: plan.begin_us)
    for launch in launches:
        owner = _around(plans.get((launch["pid"], launch["tid"]), []), float(launch["ts"]))
        if owner is not None:
            _take(owner, device[launch["args"]["correlation"]])
    return sorted((plan for found in plans.values() for plan in found), key=lambda plan: plan.begin_us)


def _around(plans: list[PlanTime], at_us: float) -> PlanTime | None:
    """The plan that was being submitted then; they follow each other on their thread."""
    place = bisect_right(plans, at_us, key=lambda plan: plan.begin_us) - 1
    return plans[place] if place >= 0 and at_us <= plans[place].end_us else None


def _take(plan: PlanTime, events: list[dict[str, Any]]) -> None:
    for event in events:
        plan.device_us += float(event["dur"])
        plan.behind_us = max(plan.behind_us, float(event["ts"]) + float(event["dur"]) - plan.end_us)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    for path in parser.parse_args(arguments).recordings:
        times = plan_times(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        print(f"{path}: {len(times)} plans, {sum(plan.device_us for plan in times) / 1e3:.3f} ms on the device")
        print(f"{'host ms':>10} {'device ms':>10} {'behind ms':>10}")
        for plan in times:
            print(f"{plan.host_us / 1e3:10.3f} {plan.device_us / 1e3:10.3f} {plan.behind_us / 1e3:10.3f}  {plan.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
