"""Soak of a running server: many requests at once, some clients leave, every survivor must be right.

Each survivor's token ids and text are compared with the same request sent alone beforehand (greedy).
A difference is allowed only where that run's two likeliest tokens were closer than 1e-4, and is
counted. At the end the server must be as empty as before: nothing running, nothing waiting, no KV
page in use, no sequence kept by the frontend.

    python benchmarks/http_soak.py --url http://127.0.0.1:8000 --requests 200 --concurrency 16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import attrs
import httpx
from prometheus_client.parser import text_string_to_metric_families

NEAR_TIE = 1e-4
WORDS = "the a river bridge of light quiet engine seven letters north garden open window paper stone and"
EMPTY_AT_REST = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "frontend_live_sequences")


@attrs.frozen(kw_only=True)
class SoakOptions:
    """What to send.

    Attributes:
        leaving: share of the clients that close their connection early.
        lengths: values of max_tokens.
        settle_s: how long the server may take to be empty again.
    """

    url: str
    requests: int = 200
    concurrency: int = 16
    leaving: float = 0.4
    prompts: int = 8
    prompt_words: tuple[int, int] = (4, 60)
    lengths: tuple[int, ...] = (12, 40)
    seed: int = 0
    api_key: str | None = None
    settle_s: float = 30.0


@attrs.frozen(kw_only=True)
class Job:
    """One request of the soak.

    Attributes:
        leaves_after: events read before the client leaves; 0: right after sending; None: it stays.
    """

    prompt: str
    max_tokens: int
    stream: bool
    chat: bool
    leaves_after: int | None


@attrs.frozen(kw_only=True)
class Answer:
    """Token ids, text and how it ended; margins between the two likeliest tokens, for an oracle's answer."""

    ids: tuple[int, ...]
    text: str
    finish: str | None
    margins: tuple[float, ...] = ()


@attrs.define
class SoakReport:
    """What happened."""

    complete: int = 0
    left: int = 0
    near_ties: int = 0
    faults: list[str] = attrs.field(factory=list)
    tokens: int = 0
    seconds: float = 0.0
    first_token_s: list[float] = attrs.field(factory=list)
    leftovers: dict[str, float] = attrs.field(factory=dict)

    @property
    def passed(self) -> bool:
        return not self.faults and not self.leftovers

    def table(self, options: SoakOptions) -> str:
        first = sorted(self.first_token_s)
        rows = [
            ("requests", f"{options.requests}, {options.concurrency} at once"),
            ("complete and correct", str(self.complete)),
            ("  of them after a near tie", str(self.near_ties)),
            ("left early", str(self.left)),
            ("wrong or failed", str(len(self.faults))),
            (
                "output tokens of survivors",
                f"{self.tokens} in {self.seconds:.1f} s, {self.tokens / self.seconds:.1f}/s",
            ),
            ("time to first token", f"median {_at(first, 0.5):.3f} s, 95% {_at(first, 0.95):.3f} s"),
            ("left over at rest", json.dumps(self.leftovers) if self.leftovers else "nothing"),
            ("machine", f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"),
        ]
        return "\n".join(f"{name:<28} {value}" for name, value in rows)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else float("nan")


def make_jobs(options: SoakOptions) -> list[Job]:
    """The same jobs for the same options."""
    source = random.Random(options.seed)
    words = WORDS.split()
    prompts = [" ".join(source.choices(words, k=source.randint(*options.prompt_words))) for _ in range(options.prompts)]
    jobs = []
    for _ in range(options.requests):
        length = source.choice(options.lengths)
        leaves = source.random() < options.leaving
        jobs.append(
            Job(
                prompt=source.choice(prompts),
                max_tokens=length,
                stream=source.random() < 0.7,
                chat=source.random() < 0.4,
                leaves_after=source.randrange(length // 2) if leaves else None,
            )
        )
    return jobs


async def soak(options: SoakOptions) -> SoakReport:
    """Run all jobs against the server at `options.url`.

    Raises: httpx.HTTPError: the server cannot be reached, or refuses what is sent to it alone.
    """
    jobs = make_jobs(options)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=options.concurrency + 2)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=600, limits=limits) as http:
        oracle: dict[tuple[str, int, bool], Answer] = {}
        for job in jobs:
            if (job.prompt, job.max_tokens, job.chat) not in oracle:
                oracle[job.prompt, job.max_tokens, job.chat] = await _alone(http, job)
        report = SoakReport()
        queue = list(enumerate(jobs))[::-1]
        began = time.perf_counter()

        async def work() -> None:
            while queue:
                number, job = queue.pop()
                try:
                    await _one(http, job, oracle[job.prompt, job.max_tokens, job.chat], report)
                except Exception as exc:
                    report.faults.append(f"request {number} ({job}): {type(exc).__name__}: {exc}")

        await asyncio.gather(*(work() for _ in range(options.concurrency)))
        report.seconds = time.perf_counter() - began
        report.leftovers = await _at_rest(http, options.settle_s)
    return report


async def _alone(http: httpx.AsyncClient, job: Job) -> Answer:
    """The answer without company, with the margins of its choices."""
    path, body = _request(attrs.evolve(job, stream=False))
    body |= {"logprobs": True, "top_logprobs": 2} if job.chat else {"logprobs": 2}
    answer = await http.post(path, json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    if job.chat:
        tables = [[top["logprob"] for top in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]]
    else:
        tables = [list(table.values()) for table in choice["logprobs"]["top_logprobs"]]
    margins = [abs(ordered[0] - ordered[1]) if len(ordered) > 1 else 0.0 for ordered in map(_descending, tables)]
    return attrs.evolve(_whole(choice), margins=tuple(margins))


def _descending(values: Sequence[float]) -> list[float]:
    return sorted(values, reverse=True)


async def _one(http: httpx.AsyncClient, job: Job, expected: Answer, report: SoakReport) -> None:
    answer = await (_streamed if job.stream else _plain)(http, job, report)
    if answer is None:
        report.left += 1
        return
    report.tokens += len(answer.ids)
    problem = _difference(answer, expected)
    if problem == "near tie":
        report.near_ties += 1
    elif problem:
        raise AssertionError(problem)
    report.complete += 1


def _difference(got: Answer, expected: Answer) -> str:
    """ "" if the answers agree, "near tie" if they part where the model was undecided, else what is wrong."""
    if got.ids == expected.ids:
        if got.text != expected.text:
            return f"the same ids, but the text {got.text!r} instead of {expected.text!r}"
        return "" if got.finish == expected.finish else f"ended with {got.finish} instead of {expected.finish}"
    pairs = zip(got.ids, expected.ids, strict=False)
    parted = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if parted is not None and expected.margins[parted] < NEAR_TIE and len(got.ids) == len(expected.ids):
        return "near tie"
    return f"ids {got.ids} instead of {expected.ids}"


async def _plain(http: httpx.AsyncClient, job: Job, report: SoakReport) -> Answer | None:
    path, body = _request(job)
    if job.leaves_after is None:
        answer = await http.post(path, json=body)
        answer.raise_for_status()
        return _whole(answer.json()["choices"][0])
    task = asyncio.ensure_future(http.post(path, json=body))
    await asyncio.wait((task,), timeout=0.02 * job.leaves_after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def _streamed(http: httpx.AsyncClient, job: Job, report: SoakReport) -> Answer | None:
    path, body = _request(job)
    ids: list[int] = []
    texts: list[str] = []
    finish: str | None = None
    done = False
    began = time.perf_counter()
    async with http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            answer.raise_for_status()
        if job.leaves_after == 0:
            return None
        seen = 0
        async with aclosing(cast("AsyncGenerator[str, None]", answer.aiter_lines())) as lines:
            async for line in lines:
                if not line:
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                    continue
                if done:
                    raise AssertionError("an event after [DONE]")
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise AssertionError(f"an error in the stream: {event['error']}")
                if not seen:
                    report.first_token_s.append(time.perf_counter() - began)
                seen += 1
                choice = event["choices"][0]
                ids += choice["token_ids"]
                texts.append(choice["delta"].get("content", "") if job.chat else choice["text"])
                finish = choice["finish_reason"] or finish
                if job.leaves_after is not None and seen >= job.leaves_after:
                    return None
    if not done:
        raise AssertionError("the stream ended without [DONE]")
    return Answer(ids=tuple(ids), text="".join(texts), finish=finish)


def _request(job: Job) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": job.stream,
    }
    if job.chat:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": job.prompt}]}
    return "/v1/completions", {**body, "prompt": job.prompt}


def _whole(choice: dict[str, Any]) -> Answer:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(ids=tuple(choice["token_ids"]), text=text, finish=choice["finish_reason"])


async def _at_rest(http: httpx.AsyncClient, settle_s: float) -> dict[str, float]:
    """What the server still holds, once it had time to let go of it."""
    deadline = time.perf_counter() + settle_s
    while (held := _held((await http.get("/metrics")).text)) and time.perf_counter() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)  # the state is another process's
    return held


def _held(metrics: str) -> dict[str, float]:
    held: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics):
        name = family.name.removeprefix("tokenspeed:")
        if name in EMPTY_AT_REST:
            held[name] += sum(sample.value for sample in family.samples)  # type: ignore[assignment]
    return {name: float(value) for name, value in held.items() if value}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--leaving", type=float, default=0.4, help="share of clients that disconnect early")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key")
    given = parser.parse_args()
    options = SoakOptions(
        url=given.url,
        requests=given.requests,
        concurrency=given.concurrency,
        leaving=given.leaving,
        seed=given.seed,
        api_key=given.api_key,
    )
    report = asyncio.run(soak(options))
    print(report.table(options))
    for fault in report.faults[:10]:
        print(fault)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
