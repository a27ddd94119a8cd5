"""What one decode round of the control plane costs, without a device.

A scripted data plane answers at once, so the figure is receive + admit + plan + dispatch + commit +
advance + the output batch, for N running requests that each get one token. Prefix publication is
on. Rounds in which requests fill a block are included; `--staggered` spreads them.

    python benchmarks/control_round.py [--running 1,16,64,256,1024] [--context 512] [--block 16] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time

import attrs
import numpy as np
from machine import machine

from tokenspeed.compose.control import ControlContainer
from tokenspeed.plane.messages import (
    ControlReply,
    FrontendMessage,
    GenerateRequest,
    OutputBatch,
    SamplingParams,
    frozen_tokens,
)
from tokenspeed.plane.plan import ForwardBatch
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.settings.model import CacheSettings, SchedulerSettings, Settings
from tokenspeed.testing import HandWakeup, ScriptedPlane


@attrs.define(eq=False)
class DroppingLink:
    """A frontend that sends what it is given and throws answers away, counting tokens."""

    inbox: list[FrontendMessage] = attrs.field(factory=list)
    tokens: int = 0
    gone: bool = False

    def receive(self) -> tuple[FrontendMessage, ...]:
        messages = tuple(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, batch: OutputBatch) -> None:
        self.tokens += len(batch.output_ids)

    def reply(self, reply: ControlReply) -> None:
        return None

    def close(self) -> None:
        return None


def answer(batch: ForwardBatch) -> list[int]:
    return [7] * int(np.count_nonzero(batch.samples))


def measure(*, running: int, context: int, block: int, staggered: bool, rounds: int, overlap: bool) -> list[float]:
    """Seconds of each of `rounds` steady decode rounds."""
    longest = context + 64 + rounds + 64
    specs = DeviceSpecs(
        backend="none",
        model_name="bench",
        dtype="float32",
        vocab_size=1 << 20,
        max_model_len=longest,
        num_pages=2 + running * (longest // block + 2),
        page_tokens=block,
        max_num_seqs=running,
        max_batched_tokens=max(8192, running),
        eos_token_ids=(0,),
    )
    settings = Settings(
        scheduler=SchedulerSettings(
            max_num_seqs=running, max_waiting=running, overlap=overlap, chunk_tokens=8192, max_batched_tokens=8192
        ),
        cache=CacheSettings(page_tokens=block),
    )
    link, plane = DroppingLink(), ScriptedPlane(answer=answer, keep_plans=False)
    box = ControlContainer(settings=settings, specs=specs, plane=plane, frontend=link, wakeup=HandWakeup())
    loop = box.loop()
    rng = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=rounds + 60)
    for i in range(running):
        length = context + (7 * i) % 64 if staggered else context
        ids = frozen_tokens(rng.integers(1, 1 << 19, size=length))
        link.inbox.append(GenerateRequest(rid=f"request-{i:06d}", input_ids=ids, sampling=sampling))
    while loop.scheduler.sizes().decoding < running:
        loop.round()
    for _ in range(8):
        loop.round()
    gc.collect()
    gc.disable()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        loop.round()
        times.append(time.perf_counter() - start)
    gc.enable()
    if link.tokens < running * rounds:
        raise SystemExit("the rounds measured did not produce a token for every request")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", default="1,16,64,256,1024")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--staggered", action="store_true")
    parser.add_argument("--depth", type=int, choices=(0, 1), default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    for running in (int(n) for n in args.running.split(",")):
        times = measure(
            running=running,
            context=args.context,
            block=args.block,
            staggered=args.staggered,
            rounds=args.rounds,
            overlap=args.depth == 1,
        )
        micro = sorted(1e6 * t for t in times)
        found.append(
            {
                "engine": "tokenspeed-py",
                "n": running,
                "context": args.context,
                "block": args.block,
                "median_us": round(statistics.median(micro), 1),
                "mean_us": round(statistics.fmean(micro), 1),
                "p99_us": round(micro[int(0.99 * (len(micro) - 1))], 1),
                "min_us": round(micro[0], 1),
            }
        )
    if args.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    print(f"decode round, context {args.context}, block {args.block}, depth {args.depth}, {machine()}")
    print(f"{'running':>8} {'median µs':>10} {'mean µs':>9} {'p99 µs':>8} {'min µs':>8}")
    for row in found:
        print(f"{row['n']:>8} {row['median_us']:>10} {row['mean_us']:>9} {row['p99_us']:>8} {row['min_us']:>8}")


if __name__ == "__main__":
    main()
