"""``tokenspeed bench``: figures of a running server, or of an engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenspeed.bench.data import Job, Shape, jobs_of_file, made_jobs
from tokenspeed.cli.console import Console
from tokenspeed.cli.engine import OpenEngine, open_engine
from tokenspeed.cli.options import add_settings, add_target
from tokenspeed.cli.progress import progress_on
from tokenspeed.errors import RequestError, SettingsError

VOCABULARY = 8000
"""Ids that models of any kind have; a server does not tell how many it has."""


def arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", required=True, dest="kind")
    serve = kinds.add_parser("serve", help="send requests to a server over HTTP")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="of the server; default %(default)s")
    serve.add_argument("--model", help="default: the server's first")
    serve.add_argument("--api-key", metavar="KEY", help="sent as Bearer token")
    serve.add_argument("--chat", action="store_true", help="send texts of --file as chat messages")
    serve.add_argument("--requests", type=_positive, metavar="N", help="default 64, with --file its lines")
    serve.add_argument("--concurrency", type=_positive, default=8, metavar="N", help="requests at once; default 8")
    serve.add_argument("--rate", type=float, metavar="R", help="requests per second, Poisson; default: no pause")
    serve.add_argument("--warmup", type=int, default=1, metavar="N", help="requests sent before, not counted")
    serve.add_argument("--file", metavar="FILE", help="texts, or JSON with prompt and output_tokens, one a line")
    serve.set_defaults(assignments=[], target=None)
    for name, text in (
        ("throughput", "all prompts at once, in this process"),
        ("latency", "one batch again and again, in this process"),
    ):
        offline = kinds.add_parser(name, help=text)
        add_target(offline)
        offline.add_argument(
            "--requests",
            type=_positive,
            default=64 if name == "throughput" else 1,
            metavar="N",
            help="default %(default)s",
        )
        if name == "latency":
            offline.add_argument("--runs", type=_positive, default=5, metavar="N", help="default %(default)s")
        add_settings(offline)
        _add_shape(offline)
    _add_shape(serve)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data", "prompts are token ids drawn from the seed")
    group.add_argument("--input-tokens", type=_positive, default=256, metavar="N", help="default %(default)s")
    group.add_argument("--output-tokens", type=_positive, default=64, metavar="N", help="default %(default)s")
    group.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="shared, before the input; default 0")
    group.add_argument("--prefix-groups", type=_positive, default=1, metavar="N", help="different prefixes; default 1")
    group.add_argument("--spread", type=float, default=0.0, metavar="F", help="lengths vary by this share, 0 to 1")
    group.add_argument("--vocabulary", type=_positive, metavar="N", help="ids below it; default 8000, or the model's")
    group.add_argument("--seed", type=int, default=0, metavar="N")
    group.add_argument("--json", metavar="FILE", help="write the figures there; -: print them in place of the table")


def run(options: argparse.Namespace, console: Console, *, engine: OpenEngine = open_engine) -> int:
    """1 if a request failed. Raises: SettingsError, RequestError."""
    if not 0 <= options.spread <= 1 or options.prefix_tokens < 0 or (options.vocabulary or VOCABULARY) <= 100:
        raise SettingsError("--spread is from 0 to 1, --prefix-tokens at least 0, --vocabulary above 100")
    if options.kind == "serve":
        return _serve(options, console)
    return _offline(options, console, engine)


def _serve(options: argparse.Namespace, console: Console) -> int:
    try:
        import aiohttp as _  # noqa: F401 - to say what is missing before anything starts
    except ImportError as exc:
        raise SettingsError("bench serve needs aiohttp: pip install 'tokenspeed-py[bench]'") from exc
    from tokenspeed.bench.client import Pace, Target, first_model, send_all
    from tokenspeed.bench.report import report_of, table_of

    if options.rate is not None and options.rate <= 0:
        raise SettingsError(f"--rate must be above 0, got {options.rate}")
    jobs = _serve_jobs(options)
    url = options.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--url: expected an address that begins with http:// or https://, got {options.url!r}")
    model = options.model or asyncio.run(first_model(url, options.api_key))
    target = Target(url=url, model=model, api_key=options.api_key, chat=options.chat)
    if options.warmup > 0:
        # Other contents than the measured ones, so that none of those is found cached.
        warm = [Job(prompt=job.prompt[::-1], output_tokens=4) for job in jobs[: options.warmup]]
        asyncio.run(send_all(warm, target, Pace(concurrency=options.concurrency)))
    pace = Pace(concurrency=options.concurrency, rate_per_s=options.rate, seed=options.seed)
    with closing(progress_on(console.stderr)) as progress:
        outcomes = asyncio.run(
            send_all(jobs, target, pace, on_done=lambda done: progress.step("requests", done, len(jobs)))
        )
    report = report_of(outcomes)
    _tell(options, console, {"kind": "serve", "model": model, **report.as_dict()}, lambda: table_of(report))
    return 1 if report.failed else 0


def _serve_jobs(options: argparse.Namespace) -> list[Job]:
    if options.file is not None:
        return jobs_of_file(Path(options.file), options.requests, output_tokens=options.output_tokens)
    return made_jobs(_shape(options, VOCABULARY), options.requests or 64, seed=options.seed)


def _offline(options: argparse.Namespace, console: Console, engine: OpenEngine) -> int:
    from tokenspeed.bench.offline import latency, throughput
    from tokenspeed.frontend.options import SamplingOptions

    def sampling(tokens: int) -> SamplingOptions:
        return SamplingOptions(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    with engine(options, console) as talker, closing(progress_on(console.stderr)) as progress:
        shape = _shape(options, min(VOCABULARY, talker.info.vocab_size))
        # Every request of a batch asks for the same number of tokens; only prompts may vary in length.
        jobs = [
            Job(prompt=job.prompt, output_tokens=options.output_tokens)
            for job in made_jobs(shape, options.requests * (1 + getattr(options, "runs", 1)), seed=options.seed)
        ]
        batches = [jobs[i : i + options.requests] for i in range(0, len(jobs), options.requests)]
        throughput(talker, batches[0][:1], sampling)  # warm-up, not counted
        if options.kind == "throughput":
            result = throughput(talker, batches[1], sampling)
            text = (
                f"{result.requests} requests, {result.prompt_tokens} tokens in, {result.output_tokens} out, in "
                f"{result.duration_s:.2f} s\n{result.output_tokens_per_s:.1f} output tokens/s, "
                f"{result.total_tokens_per_s:.1f} tokens/s"
            )
            _tell(options, console, {"kind": "throughput", **result.as_dict()}, lambda: text)
            return 0
        runs = len(batches) - 1
        timed = latency(talker, batches[1:], sampling, on_done=lambda done: progress.step("runs", done, runs))
    spread = timed.batch_ms
    line = (
        f"{timed.runs} runs of {timed.batch} requests, {options.input_tokens} tokens in, {options.output_tokens} out: "
        f"mean {spread.mean:.1f} ms, p50 {spread.p50:.1f}, p90 {spread.p90:.1f}, max {spread.max:.1f}"
    )
    _tell(options, console, {"kind": "latency", **timed.as_dict()}, lambda: line)
    return 0


def _shape(options: argparse.Namespace, vocabulary: int) -> Shape:
    return Shape(
        prompt=options.input_tokens,
        output=options.output_tokens,
        prefix=options.prefix_tokens,
        groups=options.prefix_groups,
        spread=options.spread,
        vocabulary=options.vocabulary or vocabulary,
    )


def _tell(options: argparse.Namespace, console: Console, figures: dict[str, Any], text: Callable[[], str]) -> None:
    """Raises: RequestError: the file of ``--json`` cannot be written."""
    told = json.dumps(figures, indent=2)
    if options.json == "-":
        console.say(told)
        return
    console.say(text())
    if options.json is not None:
        try:
            Path(options.json).write_text(told + "\n", encoding="utf-8")
        except OSError as exc:
            raise RequestError(f"--json {options.json}: cannot be written: {exc}", field="json") from exc


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
