"""A load client for servers of the OpenAI protocol that costs little on a small machine.

One asyncio thread, one connection a request, streamed answers whose events are counted and timed but,
except for the last, not parsed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time

import attrs

LOWEST_ID, HIGHEST_ID = 1000, 20000
"""Ordinary words of the vocabularies of the models measured; no special token."""


@attrs.frozen(kw_only=True)
class Stream:
    """One request; absolute times of its sending and of the events with tokens."""

    sent_s: float
    event_s: tuple[float, ...]
    tokens: int


@attrs.frozen(kw_only=True)
class Load:
    """So many requests at once, all sent at the same time, none answered from a prefix cache."""

    tok_s: float
    ttft_ms: float
    itl_ms: float


def load(port: int, model: str, *, concurrency: int, prompt: int, output: int, rng: random.Random) -> Load:
    """Measure one burst. Raises RuntimeError: a request was refused or ended early."""
    bodies = [
        {
            "model": model,
            "prompt": [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(concurrency)
    ]
    begun = time.perf_counter()
    answers = asyncio.run(_burst(port, bodies))
    took = time.perf_counter() - begun
    if any(answer.tokens != output for answer in answers):
        raise RuntimeError(f"answers of {sorted({answer.tokens for answer in answers})} tokens instead of {output}")
    gaps = [late - early for answer in answers for early, late in itertools.pairwise(answer.event_s)]
    return Load(
        tok_s=sum(answer.tokens for answer in answers) / took,
        ttft_ms=1e3 * statistics.median(answer.event_s[0] - answer.sent_s for answer in answers),
        itl_ms=1e3 * statistics.median(gaps) if gaps else 0.0,
    )


async def _burst(port: int, bodies: list[dict[str, object]]) -> list[Stream]:
    return await asyncio.gather(*(ask("127.0.0.1", port, json.dumps(body).encode()) for body in bodies))


async def ask(host: str, port: int, body: bytes) -> Stream:
    """Stream one completion. Raises RuntimeError: it was refused."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    sent_s = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode(errors="replace")[:2000])
    times, last = [], b""
    # Events are never split over chunks of the transfer encoding, so lines between are its own.
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        times.append(time.perf_counter())
        last = line
    writer.close()
    tokens = json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return Stream(sent_s=sent_s, event_s=tuple(times[:-1]), tokens=tokens)  # the last event has the usage
