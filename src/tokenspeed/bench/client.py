"""A load client for OpenAI-compatible servers: starts requests on schedule and notes when tokens came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from tokenspeed.bench.data import Job
from tokenspeed.errors import RequestError

if TYPE_CHECKING:
    import aiohttp


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of one request; times in seconds since it was sent.

    Attributes:
        token_s: when each piece of the answer came.
        output_tokens: as the server counts them.
        fault: "" if it was answered whole.
    """

    sent_s: float
    token_s: tuple[float, ...] = ()
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    fault: str = ""


@attrs.frozen(kw_only=True)
class Target:
    """Where requests go.

    Attributes:
        chat: send text prompts as chat messages; token ids go to the completions route in any case.
        timeout_s: of one request.
    """

    url: str
    model: str
    api_key: str | None = None
    chat: bool = False
    timeout_s: float = 600.0


@attrs.frozen(kw_only=True)
class Pace:
    """When requests are sent.

    Attributes:
        concurrency: at most so many at once.
        rate_per_s: arrivals of a Poisson process; None: each as soon as `concurrency` allows.
        seed: of the arrivals.
    """

    concurrency: int
    rate_per_s: float | None = None
    seed: int = 0


async def first_model(url: str, api_key: str | None) -> str:
    """The name under which the server presents its first model. Raises: RequestError: no such server."""
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(headers=_headers(api_key)) as session,
            session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as answer,
        ):
            answer.raise_for_status()
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as exc:
        raise RequestError(f"--url {url}: /v1/models did not answer: {exc}", status=503, field="url") from exc


async def send_all(
    jobs: Sequence[Job], target: Target, pace: Pace, *, on_done: Callable[[int], None] = lambda _: None
) -> list[Outcome]:
    """Send every job once; outcomes in the order of `jobs`. Failures are outcomes, not exceptions.

    Args:
        on_done: told how many are answered so far.
    """
    import aiohttp

    gate = asyncio.Semaphore(pace.concurrency)
    draw, done = random.Random(pace.seed), 0
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    async with aiohttp.ClientSession(
        headers=_headers(target.api_key), connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as session:

        async def one(job: Job) -> Outcome:
            nonlocal done
            try:
                return await _send(session, job, target)
            finally:
                gate.release()
                done += 1
                on_done(done)

        running: list[asyncio.Task[Outcome]] = []
        for job in jobs:
            if pace.rate_per_s is not None and running:
                await asyncio.sleep(draw.expovariate(pace.rate_per_s))
            await gate.acquire()
            running.append(asyncio.create_task(one(job)))
        return list(await asyncio.gather(*running))


async def _send(session: aiohttp.ClientSession, job: Job, target: Target) -> Outcome:
    import aiohttp

    route, body = _request(job, target)
    sent_s = time.perf_counter()
    token_s: list[float] = []
    usage: dict[str, Any] = {}
    fault = ""
    try:
        async with session.post(f"{target.url}{route}", json=body) as answer:
            if answer.status != 200:
                return Outcome(sent_s=sent_s, fault=f"{answer.status}: {_message(await answer.text())}")
            ended = False
            async for data in _events(answer.content):
                if data == b"[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                if event.get("error"):
                    fault = _message(data.decode())
                if event.get("choices") and _has_text(event["choices"][0]):
                    token_s.append(time.perf_counter() - sent_s)
                usage = event.get("usage") or usage
            if not ended and not fault:
                fault = "the stream ended before [DONE]"
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        fault = f"{type(exc).__name__}: {exc}".removesuffix(": ")
    except (AttributeError, LookupError, TypeError):
        fault = "an event of another shape than the API's"
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        sent_s=sent_s,
        token_s=tuple(token_s),
        total_s=time.perf_counter() - sent_s,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
        fault=fault,
    )


def _request(job: Job, target: Target) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": job.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if isinstance(job.prompt, str) and target.chat:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": job.prompt}]}
    return "/v1/completions", {**body, "prompt": job.prompt if isinstance(job.prompt, str) else list(job.prompt)}


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event; ours and our peers' fit on one line."""
    async for line in content:
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}
