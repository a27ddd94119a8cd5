"""When does fetching a prefix from storage beat computing it again, on this machine?

For prompts of several lengths an engine computes and stores, then forgets its own tiers (a release of the
KV memory and its return), then gets the prompt again: from storage. Printed by length: CPU time of the process
and time on the clock until the first token, computed and fetched, and bytes a token. Both are measured in turns
within one run; on a busy machine only the CPU time means something.

    python benchmarks/storage_reuse.py --path /tmp/store --lengths 64,256,1024
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

import tokenspeed
from tokenspeed import SamplingOptions
from tokenspeed.settings.model import (
    CacheSettings,
    DeviceSettings,
    ModelSettings,
    Settings,
    StorageKind,
    StorageSettings,
)

TITLES = ("computed CPU s", "fetched CPU s", "computed s", "fetched s", "from storage")


@attrs.frozen
class Spent:
    cpu_s: float
    wall_s: float


def settings_for(model: str, path: Path, longest: int, threads: int | None) -> Settings:
    return Settings(
        model=ModelSettings(source=model),
        device=DeviceSettings(kv_pool_tokens=2 * longest + 256, threads=threads),
        cache=CacheSettings(host_gib=2.0),
        storage=StorageSettings(backend=StorageKind.FILES, path=str(path), timeout_s=60.0, min_tokens=0),
    )


def spent(work: Callable[[], object]) -> Spent:
    cpu_s, wall_s = time.process_time(), time.monotonic()
    work()
    return Spent(time.process_time() - cpu_s, time.monotonic() - wall_s)


def prompt(length: int, turn: int, vocabulary: int) -> list[int]:
    return [(at * 7919 + turn * 104729) % (vocabulary - 10) + 5 for at in range(length)]


def files_in(path: Path) -> list[Path]:
    return [file for file in path.glob("*/*/*") if not file.name.startswith(".")]


def wait_until_stored(path: Path, pages: int) -> None:
    """Until so many page files are there; an engine stores them behind the answer."""
    pause = threading.Event()
    for _ in range(6000):
        if len(files_in(path)) >= pages:
            return
        pause.wait(0.02)
    raise SystemExit(f"{len(files_in(path))} of {pages} pages were stored")


def measure(engine: tokenspeed.Engine, path: Path, lengths: Sequence[int], turns: int) -> None:
    one = SamplingOptions(max_tokens=1, temperature=0.0, ignore_eos=True)
    print(f"{'tokens':>7}" + "".join(f"{title:>16}" for title in TITLES))
    pages = 0
    page_tokens = engine.info.block_size
    for length in lengths:
        computed, fetched, cached = [], [], 0
        for turn in range(turns):
            ids = prompt(length, turn * 1000 + length, engine.info.vocab_size)
            computed.append(spent(lambda ids=ids: engine.generate([ids], one)))
            pages += (length - 1) // page_tokens + (length % page_tokens == 0)
            wait_until_stored(path, pages)
            engine.control("release_memory_occupation", tags=["kv_cache"])
            engine.control("resume_memory_occupation", tags=["kv_cache"])
            answers: list[tokenspeed.Completion] = []
            fetched.append(spent(lambda ids=ids, into=answers: into.extend(engine.generate([ids], one))))
            cached = answers[0].choices[0].cached_tokens
        numbers = [
            statistics.median(getattr(run, field) for run in runs)
            for field in ("cpu_s", "wall_s")
            for runs in (computed, fetched)
        ]
        print(f"{length:>7}" + "".join(f"{number:>16.3f}" for number in numbers) + f"{cached:>16}")
    files = files_in(path)
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} pages, {size / len(files) / page_tokens:,.0f} bytes a token in storage")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ModelSettings().source)
    parser.add_argument("--path", type=Path, help="a folder that is made and removed; default: a temporary one")
    parser.add_argument("--lengths", default="64,128,256,512,1024")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args(arguments)
    lengths = [int(length) for length in chosen.lengths.split(",")]
    path = chosen.path or Path(tempfile.mkdtemp())
    try:
        with tokenspeed.Engine(settings_for(chosen.model, path, max(lengths), chosen.threads)) as engine:
            measure(engine, path, lengths, chosen.turns)
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
