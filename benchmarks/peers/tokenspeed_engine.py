"""This engine, whole and in one process: `tokenspeed.Engine`.

python tokenspeed_engine.py MODEL MODE THREADS     (MODE: of device.weights)
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
from engine_driver import Generating, Ids, serve

import tokenspeed
from tokenspeed.device.native.draw import NativeDrawer
from tokenspeed.device.native.library import native_library
from tokenspeed.device.sampling.draw import Draw
from tokenspeed.frontend.options import SamplingOptions
from tokenspeed.settings.load import load_settings

POOL_TOKENS = 49152
RANDOM = {"temperature": 0.7, "top_p": 0.95, "top_k": 40}
VOCAB = 49152


class OurBench(Generating):
    """Also measures the draw alone, which is too small for a difference of decode steps."""

    def draw(self, batch: int, threads: int) -> float:
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal(VOCAB, dtype=np.float32) * 3 for _ in range(batch)]
        draws = [Draw(number=float(rng.random()), min_p=0.0, **RANDOM) for _ in range(batch)]
        drawer = NativeDrawer(library=native_library(), threads=threads)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            drawer(rows, draws)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def bench() -> OurBench:
    model, mode, threads = sys.argv[1:4]
    sets = [f"model.source={model}", f"device.weights={mode}", f"device.threads={threads}"]
    sets += [f"device.kv_pool_tokens={POOL_TOKENS}"]
    engine = tokenspeed.Engine(load_settings(None, sets=sets))

    def generate(prompts: list[Ids], tokens: int, sampled: bool) -> object:
        how = {**RANDOM, "seed": 1} if sampled else {"temperature": 0.0}
        return engine.generate(prompts, SamplingOptions(max_tokens=tokens, ignore_eos=True, **how))

    return OurBench(generate)


serve(f"tokenspeed {tokenspeed.__version__}", bench)
