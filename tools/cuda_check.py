"""What to run first on a machine with a CUDA device: every kernel beside torch's, then one model on both backends.

::

    python tools/cuda_check.py [--json FILE]

Prints one line a check, with the largest difference and the time of a call, and ends with status 1 if one fails.
Most of the time goes into compiling kernels.
"""

# ruff: noqa: T201 -- it prints a table

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from tokenspeed import Engine, SamplingOptions
from tokenspeed.device.backends.cuda import torch_cuda
from tokenspeed.device.kernels.paged import PagedBatch, PagedLayout
from tokenspeed.device.kernels.registry import Kernels, KernelSet, kernel_set, kernels_for
from tokenspeed.device.kernels.sample_rules import SampleRules
from tokenspeed.errors import TokenspeedError
from tokenspeed.settings.model import Backend, DeviceSettings, Forward, ModelSettings, SchedulerSettings, Settings

HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 9, 3, 64, 16, 400
VOCAB, WIDTH = 49_152, 576
WITHIN = 2e-4
MODELS = ("random:tiny-llama", "random:tiny-qwen3", "random:tiny-gemma3")
PROMPTS = ([5, 6, 7], list(range(1, 60)), [9] * 20, list(range(200, 90, -1)))


@attrs.frozen(kw_only=True)
class Row:
    """One check. `difference`: the largest, or tokens that differ; `micros`: of one call; nan: not measured."""

    name: str
    ok: bool
    difference: float
    micros: float = float("nan")
    note: str = ""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(counts: list[int], contexts: list[int], *, window: int) -> PagedBatch:
    blocks = [-(-context // PAGE) for context in contexts]
    ids = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(3)).int() + 1
    tables, at = torch.zeros(len(counts), max(blocks), dtype=torch.int32), 0
    for row, count in enumerate(blocks):
        tables[row, :count] = ids[at : at + count]
        at += count
    layout = PagedLayout(page_tokens=PAGE, kv_heads=KV_HEADS, run_stride=2 * KV_HEADS, window=window)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return PagedBatch(tables=tables, offsets=offsets, contexts=torch.tensor(contexts), layout=layout)


def there(value: object, device: torch.device) -> Any:
    """`value` with its tensors on `device`, copies of their own."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, PagedBatch | SampleRules):
        kind = type(value)
        return kind(**{field.name: there(getattr(value, field.name), device) for field in attrs.fields(kind)})
    return value


def cases() -> Iterable[tuple[str, Callable[..., object], tuple[object, ...]]]:
    """Name, what to call with kernels and arguments, and the arguments; results, or first arguments, are compared."""
    x, weight = drawn(40, WIDTH), drawn(WIDTH, seed=1)
    yield "rms_norm", lambda k, *a: k.rms_norm(*a), (x, weight, 1e-5)
    yield "gemma_rms_norm", lambda k, *a: k.gemma_rms_norm(*a), (x, weight, 1e-5)
    angles = drawn(40, DIM // 2, seed=2)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    yield "rotary", lambda k, *a: k.rotary(*a), (drawn(40, HEADS, DIM), turns)
    yield "silu_mul", lambda k, *a: k.silu_mul(*a), (drawn(40, 2 * 1536) * 5,)
    yield "gelu_tanh_mul", lambda k, *a: k.gelu_tanh_mul(*a), (drawn(40, 2 * 1536) * 5,)
    pool = drawn(BLOCKS * 2 * KV_HEADS * PAGE, DIM, seed=3)
    places = torch.randperm(len(pool), generator=torch.Generator().manual_seed(4))[: 40 * 2 * KV_HEADS]
    yield "kv_write", lambda k, *a: k.kv_write(*a), (pool, places, drawn(40, 2 * KV_HEADS, DIM))
    yield "kv_gather", lambda k, *a: k.kv_gather(*a), (pool, places)
    for window in (0, 100):
        decodes = paged([1] * 6, [1, 17, 300, 900, 64, 1000], window=window)
        yield f"paged_decode, window {window}", lambda k, *a: k.paged_decode(*a), (drawn(6, HEADS, DIM), pool, decodes)
        mixed = paged([40, 1, 129, 1, 16], [40, 30, 500, 1, 400], window=window)
        arguments = (drawn(187, HEADS, DIM), pool, mixed)
        yield f"paged_prefill, window {window}", lambda k, *a: k.paged_prefill(*a), arguments
    q, kv = drawn(1, HEADS, 70, DIM), drawn(2, 1, KV_HEADS, 70, DIM, seed=6)
    yield "fresh_attention", lambda k, *a: k.fresh_attention(*a), (q, kv[0], kv[1])
    yield "gathered attention", lambda k, *a: k.decode_attention(*a), gathered(pool)
    pages = drawn(8, 2, 6, PAGE, DIM, seed=7)
    swaps = ((1, 2), (2, 3), (3, 1), (4, 5))
    yield "copy_pages", lambda k, *a: k.copy_pages(*a, swaps), (pages,)
    yield "zero_pages", lambda k, *a: k.zero_pages(*a, (2, 6)), (pages,)
    rules = SampleRules(
        temperature=torch.tensor([0.0, 1.0, 0.7, 0.9, 1.2]),
        top_k=torch.tensor([0, 0, 40, 0, 50], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.95, 0.9], dtype=torch.float64),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.05, 0.01]),
        seeds=torch.tensor([1, 2, -3, 4, 5]),
        positions=torch.tensor([0, 9, 100, 2**33, 7]),
    )
    yield "sample", lambda k, *a: k.sample(*a)[0].double(), (drawn(5, VOCAB, seed=8) * 3, rules)


def gathered(pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, blocks = 3, 5
    pages = torch.arange(2 * rows * KV_HEADS * blocks) + 7
    mask = torch.zeros(rows, 1, 1, blocks * PAGE)
    mask[0, ..., 30:] = float("-inf")
    space = torch.empty(2, rows, KV_HEADS, blocks * PAGE, DIM)
    return drawn(rows, HEADS, 1, DIM), pool.view(-1, PAGE * DIM), pages, mask, space


def check_kernel(
    name: str, call: Callable[..., object], arguments: tuple[object, ...], kernels: Kernels, device: torch.device
) -> Row:
    here, moved = [there(a, torch.device("cpu")) for a in arguments], [there(a, device) for a in arguments]
    wanted, got = call(kernel_set(KernelSet.TORCH), *here), call(kernels, *moved)
    pair = (wanted, got) if isinstance(wanted, torch.Tensor) else (here[0], moved[0])
    first, second = (value.cpu().double() for value in pair if isinstance(value, torch.Tensor))
    difference = float((first - second).abs().max())
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch leaves it so
    began.record()
    for _ in range(20):
        call(kernels, *moved)
    ended.record()
    ended.synchronize()
    return Row(name=name, ok=difference <= WITHIN, difference=difference, micros=began.elapsed_time(ended) / 20 * 1e3)


def generate(source: str, backend: Backend) -> list[list[int]]:
    settings = Settings(
        model=ModelSettings(source=source, max_len_tokens=256),
        device=DeviceSettings(backend=backend, forward=Forward.TORCH, memory_gib=1.0, kv_pool_tokens=4096),
        scheduler=SchedulerSettings(max_num_seqs=8, chunk_tokens=32),
    )
    with Engine(settings) as engine:
        wanted = SamplingOptions(max_tokens=40, temperature=0.0, ignore_eos=True)
        return [list(answer.token_ids) for answer in engine.generate([list(p) for p in PROMPTS], wanted)]


def check_model(source: str) -> Row:
    """Greedy tokens of a few prompts at once. Random weights have close calls: one differing prompt is no failure."""
    begun = time.perf_counter()
    wanted, got = (generate(source, backend) for backend in (Backend.CPU, Backend.CUDA))
    differing = sum(a != b for a, b in zip(wanted, got, strict=True))
    note = f"{differing} of {len(PROMPTS)} prompts differ, {time.perf_counter() - begun:.0f} s"
    return Row(name=source, ok=differing <= 1, difference=differing, note=note)


def attempt(name: str, check: Callable[[], Row]) -> Row:
    try:
        row = check()
    except Exception as error:  # the table has it
        row = Row(name=name, ok=False, difference=float("nan"), note=f"{type(error).__name__}: {error}"[:200])
    print(f"{'ok  ' if row.ok else 'FAIL'}  {row.name:28} {row.difference:12.3g} {row.micros:10.1f} us  {row.note}")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels and models on a CUDA device beside torch on the processor.")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    asked = parser.parse_args()
    try:
        device, kernels = torch_cuda().device, kernels_for("cuda")
    except TokenspeedError as refused:
        print(refused)
        return 2
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    rows = [attempt(n, partial(check_kernel, n, c, a, kernels, device)) for n, c, a in cases()]
    rows += [attempt(source, partial(check_model, source)) for source in MODELS]
    if asked.json is not None:
        asked.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
