"""The benchmark of the forward thread's own Python runs, and measures what it says it does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("executor", ["streams", "futures"])
def test_every_part_of_a_step_is_measured(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("forward_python")
    with torch.inference_mode():
        row = module.measure(executor, module.EXECUTORS[executor], batch=2, context=20, steps=20)
    assert (row["executor"], row["batch"], row["context"]) == (executor, 2, 20)
    assert min(row[part] for part in ("forward", "job", "result")) > 0
