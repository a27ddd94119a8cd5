"""Device time of a recording goes to the plan that launched it, in full, and within its own rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_times import OUTSIDE, PlanTimes, main, times_of


def event(cat: str, name: str, ts: float, dur: float, *, tid: object = 7, correlation: int = 0) -> dict[str, object]:
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def recording(late_us: float) -> list[dict[str, object]]:
    """Two plans; a kernel of the first runs long behind the end of its submission, into the second's."""
    return [
        event("user_annotation", "plan 1: rows=2 tokens=2", 100, 50),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=11),
        event("cuda_runtime", "cudaGraphLaunch", 120, 5, correlation=12),
        event("user_annotation", "plan 2: rows=2 tokens=2", 200, 40),
        event("cuda_runtime", "cudaLaunchKernel", 210, 5, correlation=13),
        event("cuda_runtime", "cudaLaunchKernel", 215, 5, correlation=14, tid=8),  # of another thread
        event("gpu_user_annotation", "plan 1: rows=2 tokens=2", 112, 900, tid="stream 7"),
        event("kernel", "attention", 112, 20, tid="stream 7", correlation=11),
        event("kernel", "late", 190, late_us, tid="stream 7", correlation=12),
        event("gpu_memcpy", "results", 900, 3, tid="stream 7", correlation=13),
        event("kernel", "stray", 300, 4, tid="stream 9", correlation=14),
        {"ph": "i", "name": "an instant", "ts": 1},
    ]


@pytest.mark.contract("KM-45")
def test_an_event_that_outlasts_its_plans_host_range_counts_in_full() -> None:
    assert times_of("a", recording(1000.0)) == [
        PlanTimes(file="a", title="plan 1: rows=2 tokens=2", host_us=50.0, device_us=1020.0),
        PlanTimes(file="a", title="plan 2: rows=2 tokens=2", host_us=40.0, device_us=3.0),
        PlanTimes(file="a", title=OUTSIDE, host_us=0.0, device_us=4.0),
    ]


@pytest.mark.contract("KM-45")
def test_ids_of_one_rank_mean_nothing_in_the_recording_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for rank, late_us in enumerate((1000.0, 5.0)):
        file = tmp_path / f"rank{rank}.json"
        file.write_text(json.dumps({"traceEvents": recording(late_us)}))
        files.append(str(file))
    assert main(files) == 0
    lines = [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "rank0.json: plan 1: rows=2 tokens=2: host 50 µs, device 1020 µs"
    assert lines[3] == "rank1.json: plan 1: rows=2 tokens=2: host 50 µs, device 25 µs"
    assert main([]) == 2
