"""The examples run, and stay as short as the docs say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_custom_engine_takes_its_own_policy_sampler_and_sink() -> None:
    (long, short), stored = load("custom_engine").main()
    assert len(long) == len(short) == 24
    assert stored >= 4


def test_the_custom_engine_is_under_forty_lines_of_code() -> None:
    lines = (EXAMPLES / "custom_engine.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 40


def test_a_round_can_be_driven_by_hand_without_torch() -> None:
    code = (
        f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import drive_a_round\n"
        "print(drive_a_round.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[7, 8, 9, 0]"


def test_a_policys_new_weights_give_a_fresh_engines_rollouts_to_the_last_bit() -> None:
    before, after = load("rl_loop").main()
    assert {sample.weight_version for sample in before} == {"default"}
    assert {sample.weight_version for sample in after} == {"step-1"}
    assert [sample.token_ids for sample in before] != [sample.token_ids for sample in after]
