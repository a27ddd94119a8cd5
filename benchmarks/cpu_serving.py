"""This engine beside llama.cpp, vLLM's CPU build and transformers: the same prompts, one run, turns.

Every engine runs in a process of its own. All of them take turns at one work before the next work
begins, so that a machine that others use as well slows everybody; compare ratios of one run. Works:

    decode    one step of 1, 8 and 32 rows, tokens of context each
    prefill   one prompt that nobody has seen
    warm      time to the first token of a prompt whose beginning was in an earlier one
    sampling  what random instead of greedy tokens add to a step of 32 rows
    http      streamed answers of an HTTP server, all requests of a burst at once; the other servers are stopped

    python benchmarks/cpu_serving.py [WORK ...] [--modes exact,fp16,native,int8g32] [--turns 5] [--json]
        [--llama-batched-bench PROGRAM --llama-models Q4_1=FILE,Q8_0=FILE]
        [--hf-folder FOLDER --vllm-python PYTHON --transformers-python PYTHON]

`benchmarks/peers/hf_folder.py` makes the folder. The ceiling of a burst is what prefill and decode of
the same engine alone would allow: 1 / (1 / prefill + 1 / decode) for prompts as long as the answers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
from cpu_load import Load, load
from cpu_peers import FOLDER, OURS, Driven, Spec, open_engines, open_servers, others_stopped
from machine import machine

from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.settings.model import ModelSettings

T = TypeVar("T", bound=Hashable)
Row = dict[str, object]
WORKS = ("decode", "prefill", "warm", "sampling", "http")
STEPS = {1: 32, 8: 16, 32: 8, 64: 6}
"""Decode steps of one turn by batch."""


@attrs.frozen(kw_only=True)
class Plan:
    """Sizes of the works, in tokens, and how they are repeated."""

    batches: tuple[int, ...]
    concurrency: tuple[int, ...]
    context: int
    prompt: int
    shared: int
    new: int
    length: int
    turns: int
    http_turns: int
    pause_s: float
    threads: int

    def steps(self, batch: int) -> int:
        return next(steps for upto, steps in STEPS.items() if batch <= upto)


def taken_in_turns(subjects: Sequence[T], plan: Plan, ask: Callable[[T], float | None]) -> dict[T, list[float]]:
    """Seconds of every turn by subject; those that cannot do it are left out. One turn before is not counted."""
    found: dict[T, list[float]] = {}
    for turn in range(plan.turns + 1):
        for subject in subjects:
            seconds = ask(subject)
            if seconds is not None and turn:
                found.setdefault(subject, []).append(seconds)
            time.sleep(plan.pause_s)
    return found


def row(work: str, engine: Driven, **fields: object) -> Row:
    empty = {"batch": 1, "prompt": None, "output": None, "tok_s": None, "ttft_ms": None, "itl_ms": None}
    return {"work": work, "engine": engine.engine, "mode": engine.mode, **empty, **fields}


def decode(engines: Sequence[Driven], plan: Plan) -> Iterator[Row]:
    for batch in plan.batches:
        steps = plan.steps(batch)
        found = taken_in_turns(
            engines,
            plan,
            lambda engine, batch=batch, steps=steps: engine.seconds(
                "decode", batch=batch, context=plan.context, steps=steps, sampled=False
            ),
        )
        for engine, taken in found.items():
            median = statistics.median(taken)
            yield row(
                "decode",
                engine,
                batch=batch,
                prompt=plan.context - steps // 2,
                output=steps,
                tok_s=batch / median,
                tok_s_best=batch / min(taken),
                itl_ms=1e3 * median,
            )


def prefill(engines: Sequence[Driven], plan: Plan) -> Iterator[Row]:
    for engine, taken in taken_in_turns(engines, plan, lambda e: e.seconds("prefill", prompt=plan.prompt)).items():
        median = statistics.median(taken)
        yield row(
            "prefill",
            engine,
            prompt=plan.prompt,
            output=1,
            tok_s=plan.prompt / median,
            tok_s_best=plan.prompt / min(taken),
            ttft_ms=1e3 * median,
        )


def warm(engines: Sequence[Driven], plan: Plan) -> Iterator[Row]:
    found = taken_in_turns(engines, plan, lambda e: e.seconds("warm", shared=plan.shared, new=plan.new))
    for engine, taken in found.items():
        times = {"ttft_ms": 1e3 * statistics.median(taken), "ttft_ms_best": 1e3 * min(taken)}
        yield row("warm", engine, prompt=plan.shared + plan.new, output=1, **times)


def sampling(engines: Sequence[Driven], plan: Plan) -> Iterator[Row]:
    batch = max(plan.batches)
    size = {"batch": batch, "context": plan.context, "steps": plan.steps(batch)}
    both = [(engine, sampled) for engine in engines for sampled in (True, False)]
    taken = taken_in_turns(both, plan, lambda pair: pair[0].seconds("decode", sampled=pair[1], **size))
    able = [engine for engine in engines if (engine, True) in taken]
    ours = [engine for engine in able if engine.ours]
    alone = taken_in_turns(ours, plan, lambda engine: engine.seconds("draw", batch=batch, threads=plan.threads))
    for engine in able:
        step, plain = (statistics.median(taken[engine, sampled]) for sampled in (True, False))
        more: Row = {"added_share": step / plain - 1}
        if engine in alone:
            draw = statistics.median(alone[engine])
            more |= {"draw_ms": 1e3 * draw, "draw_share": draw / plain}
        yield row("sampling", engine, batch=batch, tok_s=batch / step, itl_ms=1e3 * step, **more)


def ceilings(engines: Sequence[Driven], plan: Plan) -> dict[tuple[str, int], float]:
    """Tokens a second by mode and concurrency that our engine's prefill and decode alone would allow."""
    ours = [engine for engine in engines if engine.ours]
    found = {}
    prompt = taken_in_turns(ours, plan, lambda e: e.seconds("prefill", prompt=plan.prompt))
    for batch in plan.concurrency:
        size = {"batch": batch, "context": plan.length * 3 // 2, "steps": plan.steps(batch)}
        steps = taken_in_turns(ours, plan, lambda e, size=size: e.seconds("decode", sampled=False, **size))
        for engine in ours:
            before = statistics.median(prompt[engine]) / plan.prompt
            found[engine.mode, batch] = 1 / (before + statistics.median(steps[engine]) / batch)
    return found


def http(
    specs: Sequence[Spec], ceiling: dict[tuple[str, int], float], plan: Plan, options: argparse.Namespace
) -> Iterator[Row]:
    rng = random.Random(1)
    found: dict[tuple[int, int], list[Load]] = {}
    with open_servers([spec for spec in specs if spec.server], options.log, options.nice) as servers:
        idle = [server.idle_cores() for server in servers]
        for concurrency in plan.concurrency:
            for _ in range(plan.http_turns):
                for at, server in enumerate(servers):
                    size = {"concurrency": concurrency, "prompt": plan.length, "output": plan.length}
                    with others_stopped(server, servers):
                        found.setdefault((concurrency, at), []).append(load(server.port, "m", rng=rng, **size))
                    time.sleep(plan.pause_s)
        for (concurrency, at), loads in found.items():
            server = servers[at]
            yield {
                "work": "http",
                "engine": server.engine,
                "mode": server.mode,
                "batch": concurrency,
                "prompt": plan.length,
                "output": plan.length,
                "tok_s": statistics.median(one.tok_s for one in loads),
                "tok_s_best": max(one.tok_s for one in loads),
                "ttft_ms": statistics.median(one.ttft_ms for one in loads),
                "itl_ms": statistics.median(one.itl_ms for one in loads),
                "ceiling_tok_s": ceiling.get((server.mode, concurrency)) if server.engine == OURS else None,
                "ready_s": server.ready_s,
                "idle_cores": idle[at],
                "memory_mib": server.memory_mib(),
            }


def specs_of(options: argparse.Namespace) -> list[Spec]:
    """Every engine that the command line gives, ours first."""
    threads, python = str(options.threads), sys.executable
    specs = []
    for mode in options.modes:
        served = [python, "-m", "tokenspeed", "serve", "--model", options.model, "--served-model-name", "m"]
        served += ["--threads", threads, "--set", f"device.weights={mode}"]
        driver = (python, str(FOLDER / "tokenspeed_engine.py"), options.model, mode, threads)
        specs.append(Spec(engine=OURS, mode=mode, driver=driver, server=tuple(served)))
    for entry in filter(None, options.llama_models.split(",")) if options.llama_batched_bench else ():
        mode, _, file = entry.partition("=")
        driver = (python, str(FOLDER / "llama_cpp_engine.py"), options.llama_batched_bench, file, threads)
        specs.append(Spec(engine="llama.cpp", mode=mode, driver=driver))
    if options.vllm_python:
        vllm = (options.vllm_python, str(FOLDER / "vllm_cpu_engine.py"), options.hf_folder, "float32", threads)
        served = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.hf_folder]
        served += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "2048", "--host", "127.0.0.1"]
        served += ["--gpu-memory-utilization", "0.3"]  # means main memory in the CPU build, where 0.92 is the default
        # Left to itself the server computes on one core of two and keeps the other for its own processes.
        bound = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}", "OMP_NUM_THREADS": threads}
        library = Path(options.vllm_python).parents[1] / "lib" / "libiomp5.so"
        if library.exists():  # as its manual recommends
            bound["LD_PRELOAD"] = str(library)
        specs.append(Spec(engine="vllm-cpu", mode="float32", driver=vllm, server=tuple(served), environment=bound))
    if options.transformers_python:
        driver = (options.transformers_python, str(FOLDER / "transformers_engine.py"))
        specs.append(
            Spec(engine="transformers", mode="float32", driver=(*driver, options.hf_folder, "float32", threads))
        )
    return specs


def measure(options: argparse.Namespace, plan: Plan) -> Iterator[Row]:
    specs = specs_of(options)
    wanted = [work for work in WORKS if work in (options.works or WORKS)]
    forward = {"decode": decode, "prefill": prefill, "warm": warm, "sampling": sampling}
    drivers = specs if set(wanted) - {"http"} else [spec for spec in specs if spec.engine == OURS]
    with open_engines(drivers, options.log, options.nice) as engines:
        for work in wanted:
            if work in forward:
                print(f"{work} …", file=sys.stderr)
                yield from forward[work](engines, plan)
        ceiling = ceilings(engines, plan) if "http" in wanted else {}
    if "http" in wanted:
        print("http …", file=sys.stderr)
        yield from http(specs, ceiling, plan, options)


def show(found: Row) -> str:
    """One line of the table; a figure that a work does not have is left out."""
    figures = ("tok_s", "tok_s_best", "ttft_ms", "itl_ms", "ceiling_tok_s", "ready_s", "idle_cores")
    parts = [f"{name} {found[name]:.1f}" for name in figures if isinstance(found.get(name), float)]
    parts += [f"{name} {found[name]:.3f}" for name in ("added_share", "draw_ms", "draw_share") if name in found]
    if "memory_mib" in found:
        parts.append(f"memory_mib {found['memory_mib']}")
    return f"{found['work']:9} {found['engine']:20} {found['mode']:8} {found['batch']:>4}  {'  '.join(parts)}"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("works", nargs="*", choices=[*WORKS, []], metavar="WORK", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["exact", "fp16", "native", "int8g32"])
    parser.add_argument("--model", default=ModelSettings().source)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--http-turns", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between turns")
    parser.add_argument("--batches", type=numbers, default=(1, 8, 32))
    parser.add_argument("--concurrency", type=numbers, default=(1, 8, 32, 64))
    parser.add_argument("--llama-batched-bench")
    parser.add_argument("--llama-models", default="", help="MODE=FILE.gguf, separated by commas")
    parser.add_argument("--hf-folder", help="the model for vLLM and transformers")
    parser.add_argument("--vllm-python")
    parser.add_argument("--transformers-python")
    parser.add_argument("--nice", type=int, default=0, help="priority of what is measured")
    parser.add_argument("--log", type=Path, default=Path("cpu_serving.log"), help="what engines print")
    parser.add_argument("--json", action="store_true", help="a list of rows")
    options = parser.parse_args()
    if (options.vllm_python or options.transformers_python) and not options.hf_folder:
        parser.error("--vllm-python and --transformers-python need --hf-folder")
    resolve_model(ModelSettings(source=options.model), NoProgress())  # fetched before anything is timed
    plan = Plan(
        batches=options.batches,
        concurrency=options.concurrency,
        context=256,
        prompt=512,
        shared=1024,
        new=16,
        length=128,
        turns=options.turns,
        http_turns=options.http_turns,
        pause_s=options.pause,
        threads=options.threads,
    )
    print(f"{machine()}, {options.threads} threads, {options.model}", file=sys.stderr)
    rows = []
    for found in measure(options, plan):
        rows.append(found)
        print(show(found), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
