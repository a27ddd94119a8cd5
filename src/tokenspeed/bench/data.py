"""What a measurement sends: prompts of token ids made from a seed, or the lines of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from tokenspeed.errors import RequestError

Prompt: TypeAlias = str | tuple[int, ...]
FIRST_ID = 100
"""Smaller ids are often special tokens."""


@attrs.frozen(kw_only=True)
class Job:
    """One request.

    Attributes:
        prompt: text, or token ids.
        output_tokens: to be generated; the end of sequence is ignored, so it is exact.
    """

    prompt: Prompt
    output_tokens: int


@attrs.frozen(kw_only=True)
class Shape:
    """Lengths of made-up requests, in tokens.

    Attributes:
        prefix: shared by the prompts of a group, besides `prompt`.
        groups: how many different prefixes there are.
        spread: each length is drawn uniformly from [(1 - spread) x, (1 + spread) x].
        vocabulary: ids are drawn from [100, vocabulary).
    """

    prompt: int = 256
    output: int = 64
    prefix: int = 0
    groups: int = 1
    spread: float = 0.0
    vocabulary: int = 8000


def made_jobs(shape: Shape, count: int, *, seed: int) -> list[Job]:
    """`count` requests of token ids; equal for equal arguments."""
    draw = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_ID, shape.vocabulary) for _ in range(length))

    def around(length: int) -> int:
        low, high = round(length * (1 - shape.spread)), round(length * (1 + shape.spread))
        return max(1, draw.randint(low, high))

    prefixes = [ids(shape.prefix) for _ in range(shape.groups)]
    return [
        Job(
            prompt=(*prefixes[number % shape.groups], *ids(around(shape.prompt))),
            output_tokens=around(shape.output),
        )
        for number in range(count)
    ]


def jobs_of_file(path: Path, count: int | None, *, output_tokens: int) -> list[Job]:
    """One request a line: JSON with ``prompt`` (text or ids) and perhaps ``output_tokens``, or the text itself.

    Args:
        count: more than the file has: from the start again; None: each once.
        output_tokens: for lines that do not say.
    Raises: RequestError: names file, line and fault.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"--file {path}: cannot be read: {exc}", field="file") from exc
    if not lines:
        raise RequestError(f"--file {path}: has no lines", field="file")
    jobs = [_job_of_line(line, f"--file {path}:{number}", output_tokens) for number, line in enumerate(lines, 1)]
    return jobs if count is None else [jobs[i % len(jobs)] for i in range(count)]


def _job_of_line(line: str, where: str, output_tokens: int) -> Job:
    if not line.lstrip().startswith("{"):
        return Job(prompt=line, output_tokens=output_tokens)
    try:
        told: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as exc:
        raise RequestError(f"{where}: not JSON: {exc}", field="file") from exc
    prompt = told.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise RequestError(f"{where}: prompt must be a text or a list of token ids", field="file")
    tokens = told.get("output_tokens", output_tokens)
    if type(tokens) is not int or tokens < 1:
        raise RequestError(f"{where}: output_tokens must be a positive integer, got {tokens!r}", field="file")
    return Job(prompt=prompt, output_tokens=tokens)


def prompt_tokens(jobs: Sequence[Job]) -> int | None:
    """Of all `jobs`; None if some are texts, whose tokens only the server can count."""
    lengths = [len(job.prompt) for job in jobs if not isinstance(job.prompt, str)]
    return sum(lengths) if len(lengths) == len(jobs) else None
