"""Reading recordings: device work belongs to the plan that launched it, whenever it runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from source_tree import ROOT

HOST, FORWARD, OTHER = 4000, 7, 8


@pytest.fixture(scope="module")
def trace_time() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_time", ROOT / "benchmarks" / "trace_time.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_time"] = module
    spec.loader.exec_module(module)
    return module


def event(cat: str, name: str, ts: float, dur: float, *, tid: int = FORWARD, correlation: int = 0) -> dict[str, Any]:
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launch(correlation: int, at: float, tid: int = FORWARD) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", at, 2, tid=tid, correlation=correlation)


def kernel(correlation: int, at: float, dur: float) -> dict[str, Any]:
    return {**event("kernel", "gemm", at, dur, tid=0, correlation=correlation), "pid": 0}


def one_rank() -> list[dict[str, Any]]:
    return [
        event("user_annotation", "plan 1: rows=2 tokens=40", 0, 100),
        event("user_annotation", "plan 2: rows=2 tokens=2", 110, 50),
        launch(11, 50),
        kernel(11, 90, 400),  # begins in its plan's range, ends long behind it and behind the next plan's
        launch(12, 120),
        kernel(12, 500, 30),  # begins when nobody submits any more
        launch(13, 130, tid=OTHER),  # another thread's
        kernel(13, 60, 7),
    ]


@pytest.mark.contract("KM-45")
def test_device_work_counts_whole_for_the_plan_that_launched_it_and_for_its_rank(trace_time: ModuleType) -> None:
    first, second = trace_time.plan_times(one_rank())
    assert (first.title, first.host_us, first.device_us, first.behind_us) == ("plan 1: rows=2 tokens=40", 100, 400, 390)
    assert (second.host_us, second.device_us, second.behind_us) == (50, 30, 370)
    # Another rank's process counts its launches from the same number on.
    peer = [event("user_annotation", "plan 1: rows=1 tokens=9", 0, 10), launch(11, 5), kernel(11, 5, 3)]
    assert [(plan.device_us, plan.behind_us) for plan in trace_time.plan_times(peer)] == [(3, 0)]
    assert [plan.device_us for plan in trace_time.plan_times(one_rank())] == [400, 30]


def test_a_recording_without_a_device_has_plans_of_the_host_alone(
    trace_time: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "forward-1.json"
    file.write_text(json.dumps({"traceEvents": one_rank()[:2]}))
    assert trace_time.main([str(file)]) == 0
    assert "2 plans, 0.000 ms on the device" in capsys.readouterr().out
