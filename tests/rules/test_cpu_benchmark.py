"""The CPU benchmark takes its figures from what engines did, in turns, and leaves out what one cannot do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DRIVER = """
import sys
sys.path.insert(0, {peers!r})
from engine_driver import serve

class Bench:
    def decode(self, batch, context, steps, *, sampled):
        return 0.25 * batch
    def prefill(self, prompt):
        return prompt / 100
    def warm(self, shared, new):
        raise NotImplementedError

print("words that are no answer", file=sys.stderr)
serve("scripted 1", Bench)
"""


@pytest.fixture(name="serving")
def fixture_serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    return importlib.import_module("cpu_serving")


def test_engines_answer_over_their_pipes_and_one_that_does_not_start_is_left_out(
    serving: ModuleType, tmp_path: Path
) -> None:
    peers = importlib.import_module("cpu_peers")
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(peers=str(BENCHMARKS / "peers")))
    specs = [
        peers.Spec(engine="scripted", mode="a", driver=(sys.executable, str(script))),
        peers.Spec(engine="broken", mode="b", driver=(sys.executable, "-c", "raise SystemExit(3)")),
    ]
    plan = serving.Plan(
        batches=(1, 8),
        concurrency=(1,),
        context=256,
        prompt=512,
        shared=64,
        new=8,
        length=16,
        turns=2,
        http_turns=1,
        pause_s=0.0,
        threads=1,
    )
    with peers.open_engines(specs, tmp_path / "log", 0) as engines:
        decode = list(serving.decode(engines, plan))
        prefill = list(serving.prefill(engines, plan))
        assert list(serving.warm(engines, plan)) == []
    assert [(row["engine"], row["mode"], row["batch"], row["tok_s"], row["itl_ms"]) for row in decode] == [
        ("scripted 1", "a", 1, 4.0, 250.0),
        ("scripted 1", "a", 8, 4.0, 2000.0),
    ]
    assert [(row["prompt"], row["tok_s"], row["ttft_ms"]) for row in prefill] == [(512, 100.0, 5120.0)]
    assert "words that are no answer" in (tmp_path / "log").read_text()


def test_a_decode_step_is_what_further_tokens_of_known_prompts_cost(serving: ModuleType) -> None:
    del serving
    driver = importlib.import_module("engine_driver")
    asked = []
    bench = driver.Generating(lambda prompts, tokens, sampled: asked.append((prompts, tokens, sampled)))
    assert bench.decode(2, 100, 10, sampled=True) > 0
    assert [(tokens, sampled) for _, tokens, sampled in asked] == [(1, False), (1, True), (11, True)]
    assert [len(ids) for ids in asked[0][0]] == [95, 95]
    assert asked[0][0] == asked[2][0]
    bench.warm(64, 8)
    first, second = (asked[at][0][0] for at in (3, 4))
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
