"""What a rank and a frontend keep in memory beside weights and KV pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
RANK = """
import random
import tokenspeed
from tokenspeed.settings.load import load_settings
from tokenspeed.frontend.options import SamplingOptions
sets = ["model.source=random:tiny-llama", "device.kv_pool_tokens=8192", "device.threads=2"]
with tokenspeed.Engine(load_settings(None, sets=sets)) as engine:
    rng = random.Random(0)
    prompts = [[rng.randrange(100) for _ in range(64)] for _ in range(64)]
    engine.generate(prompts, SamplingOptions(max_tokens=8, ignore_eos=True, temperature=0.0))
    print(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
"""
FRONTEND = """
import sys
import tokenspeed.launch.frontend_main, tokenspeed.compose.serving
assert "torch" not in sys.modules
print(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
"""


def resident_mib(program: str) -> float:
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    return int(done.stdout.split()[-1]) * 1024 / MIB


def test_a_rank_takes_less_than_300_mib_beside_weights_and_pool() -> None:
    """Weights and pool of this model are some 2 MiB, so that nearly all of it is libraries and scratch."""
    assert 100 < resident_mib(RANK) < 1.3 * 2 + 300


def test_a_frontend_without_its_tokenizer_takes_less_than_100_mib() -> None:
    assert 10 < resident_mib(FRONTEND) < 100
