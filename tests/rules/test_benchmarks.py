"""The round benchmark runs: its figures are those of rounds that did what they should."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(name="rounds")
def fixture_rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("control_round")


@pytest.mark.parametrize("staggered", [False, True])
def test_rounds_of_the_benchmark_give_every_request_its_token(rounds: ModuleType, staggered: bool) -> None:
    rows = rounds.round_rows(5, 64, 16, staggered=staggered)
    assert [row["engine"] for row in rows] == [rounds.ENGINE, rounds.LOOP]
    assert all(0 < row["min_us"] <= row["median_us"] <= row["p99_us"] for row in rows)
    assert {key: rows[0][key] for key in ("n", "context", "block")} == {"n": 5, "context": 64, "block": 16}


def test_a_long_prompt_of_the_benchmark_misses_once_and_then_hits(rounds: ModuleType) -> None:
    row = rounds.long_row(64, repeats=1)
    assert min(row[name] for name in ("submit_us", "admit_us", "hit_submit_us", "hit_admit_us")) > 0


def test_a_waiting_request_takes_less_than_two_kilobytes_beside_its_tokens(rounds: ModuleType) -> None:
    assert 0 < rounds.waiting_bytes(count=512)["bytes_each"] < 2000
