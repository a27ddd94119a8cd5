"""Cost of the scheduler alone: plan and advance of a decode round, no model, no loop.

    python benchmarks/scheduler_round.py [--n 1 16 64 256 1024] [--context 512 16384] [--block 16 64]

Every request decodes one token a round at depth 1; tokens are appended to the request table as the
output side does, outside the timed part. ``lockstep``: all requests fill a block in the same round;
``staggered``: prompt lengths 512 + 7 i mod 64, so that about n / block do in each round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

import numpy as np

from tokenspeed.plane.plan import Sampling, int32
from tokenspeed.plane.results import ForwardLanded
from tokenspeed.plane.table import RequestTable, request_table
from tokenspeed.scheduler.build import build_scheduler
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.policy import Fcfs
from tokenspeed.scheduler.scheduler import PagedScheduler

ROUNDS = 160
WARM = 32


def scheduler_of(n: int, context: int, block: int) -> tuple[PagedScheduler, RequestTable]:
    longest = context + ROUNDS + 256
    pages = n * (longest // block + 2) + 8
    config = SchedulerConfig(
        max_num_seqs=n,
        # Whole prompts of all in one forward, so that "lockstep" means it.
        max_batched_tokens=n * longest,
        chunk_tokens=longest,
        page_tokens=block,
        num_pages=pages,
        max_model_len=longest,
        overlap_schedule_depth=1,
    )
    table = request_table(slots=n, max_len=longest)
    return build_scheduler(config, table, Fcfs()), table


def add(table: RequestTable, name: str, length: int, rng: np.random.Generator, *, max_new: int = ROUNDS + 128) -> int:
    tokens = int32(rng.integers(0, 32000, length))
    return table.add(rid=name, tokens=tokens, max_new=max_new, sampling=Sampling(), eos_ends=False)


def commit(table: RequestTable, batch: object) -> ForwardLanded:
    """What the output side does to the table, without outputs."""
    rows = batch.rows[batch.samples]
    known = table.tokens.known[rows]
    table.tokens.seated[table.schedule.slot[rows], known] = known & 31
    table.tokens.known[rows] = known + 1
    return ForwardLanded(batch=batch)


def measure(n: int, context: int, block: int, *, staggered: bool, waiting: int = 0) -> dict[str, object]:
    rng = np.random.default_rng(0)
    scheduler, table = scheduler_of(n, context, block)
    lengths = [context + (7 * i) % 64 if staggered else context for i in range(n)]
    began = time.perf_counter_ns()
    scheduler.submit([add(table, f"r{i}", length, rng) for i, length in enumerate(lengths)])
    flying = None
    while scheduler.sizes().decoding < n:
        plan = scheduler.next_execution_plan()
        scheduler.advance([commit(table, plan.batch)])
    admit_us = (time.perf_counter_ns() - began) / 1000 / n
    scheduler.submit([add(table, f"w{i}", 64, rng) for i in range(waiting)])
    scheduler.drain_kv_events()
    gc.collect()
    gc.freeze()
    totals: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        plan = scheduler.next_execution_plan()
        middle = time.perf_counter_ns()
        landed = None if flying is None else commit(table, flying)
        resume = time.perf_counter_ns()
        if landed is not None:
            scheduler.advance([landed])
        scheduler.drain_kv_events()
        totals.append((middle - start + time.perf_counter_ns() - resume) / 1000)
        flying = plan.batch
    times = sorted(totals[WARM:])
    return {
        "n": n,
        "context": context,
        "block": block,
        "mode": "staggered" if staggered else "lockstep",
        "waiting": waiting,
        "median_us": round(statistics.median(times), 1),
        "min_us": round(times[0], 1),
        "mean_us": round(statistics.fmean(times), 1),
        "p99_us": round(times[int(0.99 * (len(times) - 1))], 1),
        "admit_us": round(admit_us, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="*", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--context", type=int, nargs="*", default=[512])
    parser.add_argument("--block", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--waiting", type=int, nargs="*", default=[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [
        measure(n, context, block, staggered=staggered, waiting=waiting)
        for staggered in (False, True)
        for block in options.block
        for context in options.context
        for waiting in options.waiting
        for n in options.n
    ]
    if options.json:
        print(json.dumps(results))
        return
    columns = list(results[0])
    print(" ".join(f"{name:>10}" for name in columns))
    for result in results:
        print(" ".join(f"{result[name]!s:>10}" for name in columns))


if __name__ == "__main__":
    main()
