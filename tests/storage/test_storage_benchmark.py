"""The benchmark of storage measures what it says: the second time, nothing but the rest of the prompt is computed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_benchmark_fetches_what_it_computed_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    folder = tmp_path / "store"
    importlib.import_module("storage_reuse").main(
        ["--model", "random:tiny-llama", "--path", str(folder), "--lengths", "40,96", "--turns", "1", "--threads", "1"]
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:3]]
    assert [(row[0], row[-1]) for row in rows] == [("40", "32"), ("96", "80")]
    assert lines[3].startswith("8 pages, ")
    assert not folder.exists()
