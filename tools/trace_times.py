"""Where device time of a recording belongs: to the plan whose submission launched it, however late it ran.

::

    python tools/trace_times.py forward-1.json [MORE.json ...]

A recording (`/start_profile`) is one Chrome trace a rank. Launches and device events are matched by their correlation
id, which is unique within one process only, so never across files. An event counts in full: device work may outlast the
host range in which it was launched (KM-45).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
OUTSIDE = "outside of plans"


@attrs.frozen(kw_only=True)
class PlanTimes:
    """One plan of one recording; times in µs.

    Attributes:
        host_us: of its submission on the forward thread.
        device_us: of everything it launched; 0 where nothing but the host was recorded.
    """

    file: str
    title: str
    host_us: float
    device_us: float


@attrs.frozen(kw_only=True)
class Range:
    """A plan's submission on one thread."""

    title: str
    thread: tuple[object, object]
    begin_us: float
    end_us: float

    def holds(self, event: Mapping[str, object]) -> bool:
        return thread_of(event) == self.thread and self.begin_us <= number(event, "ts") < self.end_us


def thread_of(event: Mapping[str, object]) -> tuple[object, object]:
    return event.get("pid"), event.get("tid")


def number(event: Mapping[str, object], name: str) -> float:
    value = event.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def correlation(event: Mapping[str, object]) -> object:
    args = event.get("args")
    return args.get("correlation") if isinstance(args, dict) else None


def times_of(file: str, events: Iterable[Mapping[str, object]]) -> list[PlanTimes]:
    """Every plan of one recording in the order of its submission, and last what no plan launched, if any."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [
        Range(
            title=str(event["name"]),
            thread=thread_of(event),
            begin_us=number(event, "ts"),
            end_us=number(event, "ts") + number(event, "dur"),
        )
        for event in complete
        if event.get("cat") == "user_annotation" and str(event.get("name")).startswith("plan ")
    ]
    owner: dict[object, int] = {}
    for event in complete:
        if event.get("cat") in LAUNCH:
            found = [index for index, span in enumerate(ranges) if span.holds(event)]
            if found:
                owner[correlation(event)] = found[-1]
    device = [0.0] * (len(ranges) + 1)
    for event in complete:
        if event.get("cat") in DEVICE:
            device[owner.get(correlation(event), len(ranges))] += number(event, "dur")
    plans = [
        PlanTimes(file=file, title=span.title, host_us=span.end_us - span.begin_us, device_us=device[index])
        for index, span in enumerate(ranges)
    ]
    plans.sort(key=lambda plan: int(plan.title.split()[1].rstrip(":")))
    left = [PlanTimes(file=file, title=OUTSIDE, host_us=0.0, device_us=device[-1])] if device[-1] else []
    return plans + left


def main(files: Sequence[str]) -> int:
    if not files:
        sys.stdout.write(str(__doc__))
        return 2
    for file in files:
        for plan in times_of(file, json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]):
            times = f"host {plan.host_us:.0f} µs, device {plan.device_us:.0f} µs"
            sys.stdout.write(f"{plan.file}: {plan.title}: {times}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
