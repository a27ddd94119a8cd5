"""What a round of the control plane costs, without a device; where installed, beside other schedulers.

    python benchmarks/control_round.py [--n 1 16 64 256 1024] [--block 64 16] [--json]
        [--peers --tokenspeed-python PATH --vllm-python PATH --nano-vllm-python PATH]

* decode round: plan, commit, advance and the output batch ready to encode, one new token for each
  request, depth 1, prefix publication on, results scripted. ``lockstep``: all fill a block in the same
  round, so the mean lies far above the median; ``staggered``: lengths context + 7 i mod 64, with cache
  events, so that some fill a block in each round.
* whole loop: `EventLoop.round`: with receive, admission, load, records and a data plane that does nothing.
* long prompt: 32,768 tokens; submit (checks, table, queue) and admit (look-up, pages, plan) apart, on a
  miss and on a hit of all but the last 64 tokens; and the longest round of 32 running decodes while such
  a prompt arrives as frames on another thread and is computed in chunks.
* waiting: the round with 4,096 waiting requests against 16, and the memory one takes beside its tokens.

A peer is driven by a script of `benchmarks/peers` under its own interpreter; all take turns of a few
rounds each, so that a busy machine slows everybody. Compare ratios and minima. ``cpu`` is the CPU time
of the thread. A peer that does not answer in time is named and left out.

Rows are printed as they are done, progress goes to standard error. With ``--json``: a list of objects with
``engine``, ``n``, ``context``, ``block``, ``median_us``, ``min_us``, and ``what`` else belongs to each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from machine import machine
from round_peers import LongPrompt, Peers, open_peers, say
from round_rig import (
    TOKEN,
    DroppingLink,
    Rig,
    Timer,
    clock,
    open_rig,
    quiet,
    request,
    running_rig,
    spread,
    tokens,
)

from tokenspeed.plane.messages import GenerateRequest, Int32Array
from tokenspeed.plane.results import ForwardResult
from tokenspeed.wire.codec import EngineCodec, FrontendCodec
from tokenspeed.wire.layouts import LAYOUTS

__all__ = ["DroppingLink", "main"]

ENGINE, LOOP = "tokenspeed-py", "tokenspeed-py, whole loop"
ROUNDS, TURN = 160, 16
ROOM = ROUNDS + 64
LONG, SHORT_TAIL = 32 * 1024, 64
MANY, FEW = 4096, 16
BUSY = 32
SWITCH_INTERVAL_S = 0.0005
"""As in a rank process."""

Figures = dict[str, object]


def in_turns(calls: Mapping[str, Callable[[], object]], peers: Peers | None = None) -> dict[str, Timer]:
    """`ROUNDS` of each, a few at a time; of the peers, those that have done all of theirs."""
    peers = peers or Peers()
    timers = {name: Timer() for name in (*calls, *(peer.engine for peer in peers.live))}
    with quiet():
        for _ in range(ROUNDS // TURN):
            for name, call in calls.items():
                timers[name].run(call, TURN)
            for engine, (wall, cpu) in peers.each(lambda peer: peer.rounds(TURN)).items():
                timers[engine].wall += wall
                timers[engine].cpu += cpu
    return {name: timer for name, timer in timers.items() if len(timer.wall) == ROUNDS}


def decode_call(n: int, context: int, block: int, *, staggered: bool) -> Callable[[], object]:
    rig = running_rig(n, context, block, rounds=ROOM, staggered=staggered)
    rig.take_over()
    return partial(rig.decode_round, ForwardResult(tokens=[TOKEN] * n))


def round_rows(n: int, context: int, block: int, *, staggered: bool, peers: Peers | None = None) -> list[Figures]:
    """Our decode round and whole loop, and the decode round of each peer."""
    loop = running_rig(n, context, block, rounds=ROOM, staggered=staggered)
    before = loop.link.tokens
    if peers is not None:
        peers.each(lambda peer: peer.prepare(n=n, context=context, block=block, rounds=ROOM))
    calls = {ENGINE: decode_call(n, context, block, staggered=staggered), LOOP: loop.loop.round}
    timers = in_turns(calls, peers)
    if loop.link.tokens - before != n * ROUNDS:
        raise SystemExit("the rounds measured did not produce a token for every request")
    what = "staggered" if staggered else "lockstep"
    shape = {"what": what, "n": n, "context": context, "block": block}
    return [{"engine": name, **shape, **timer.figures()} for name, timer in timers.items()]


def flat_rows(block: int) -> list[Figures]:
    """64 requests at two lengths of context."""
    contexts = (512, 16384)
    timers = in_turns({str(context): decode_call(64, context, block, staggered=False) for context in contexts})
    return [
        {"engine": ENGINE, "what": "flat", "n": 64, "context": int(at), "block": block, **timer.figures()}
        for at, timer in timers.items()
    ]


def waiting_rows() -> list[Figures]:
    """The whole loop of 64 running requests in front of few and of many waiting ones."""
    rigs = {str(count): running_rig(64, 512, 16, rounds=ROOM, waiting=count) for count in (FEW, MANY)}
    timers = in_turns({name: rig.loop.round for name, rig in rigs.items()})
    for name, rig in rigs.items():
        if rig.loop.scheduler.sizes().waiting != int(name):
            raise SystemExit(f"{rig.loop.scheduler.sizes().waiting} of {name} requests wait")
    shape = {"engine": LOOP, "what": "waiting", "n": 64, "context": 512, "block": 16}
    rows: list[Figures] = [{**shape, "waiting": int(name), **timer.figures()} for name, timer in timers.items()]
    rows[-1]["bytes_each"] = waiting_bytes()
    return rows


def waiting_bytes(count: int = MANY) -> int:
    """Memory of a waiting request beyond its tokens: table, queue and what ingress keeps."""
    rig = open_rig(seats=1, max_len=1024, block=16, batched=64, chunk=64, waiting=count)
    rng = np.random.default_rng(1)
    rig.link.inbox.append(request("running", tokens(rng, 64), max_new=512))
    rig.settle(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(count):
        rig.link.inbox.append(request(f"waiting-{i:08d}", tokens(rng, 64), max_new=8))
    rig.loop.round()
    each = (tracemalloc.get_traced_memory()[0] - before) / count
    tracemalloc.stop()
    if rig.loop.scheduler.sizes().waiting != count:
        raise SystemExit(f"{rig.loop.scheduler.sizes().waiting} of {count} requests wait")
    return round(each - 4 * 64)


# ---- a long prompt ------------------------------------------------------------------------------


def admitted(rig: Rig, rid: str, ids: Int32Array) -> tuple[int, int, int]:
    """Submit and admit one request. Returns nanoseconds of each, and the tokens left to compute.

    While others decode, a plan looks up so many pages and no more; admit is all plans up to the one that seats it.
    """
    loop, message = rig.loop, request(rid, ids, max_new=32)
    start = clock()
    intake = loop.ingress.admit((message,), holds=loop.scheduler.holds, buffers=never, waiting=int)
    loop.scheduler.submit(intake.rows)
    submitted, admitting = clock() - start, 0
    while True:
        start = clock()
        plan = loop.scheduler.next_execution_plan()
        admitting += clock() - start
        if plan.batch is None:
            raise SystemExit("a long prompt was not admitted at once")
        rig.flying.append(plan.batch)
        if plan.seated:
            return submitted, admitting, plan.batch.num_tokens
        land(rig)


def never(_: str) -> bool:
    return False


def land(rig: Rig) -> None:
    batch = rig.flying.popleft()
    result = ForwardResult(tokens=[TOKEN] * int(np.count_nonzero(batch.samples)))
    rig.loop.scheduler.advance((rig.loop.output.commit(batch, result),))
    rig.loop.output.take(None)


def long_rows(block: int, repeats: int = 7) -> list[Figures]:
    """Submit and admit of a prompt that was never seen, and of one that was, but for its last tokens."""
    columns: dict[str, list[int]] = {"submit": [], "admit": [], "hit_submit": [], "hit_admit": []}
    for seed in range(repeats):
        rig = open_rig(seats=4, max_len=LONG + 128, block=block, batched=LONG + 64, chunk=LONG + 64)
        ids = tokens(np.random.default_rng(seed), LONG)
        again = np.concatenate((ids[:-SHORT_TAIL], tokens(np.random.default_rng(99), SHORT_TAIL)))
        with quiet():
            submit, admit, _ = admitted(rig, "first", ids)
            for _ in range(3):
                land(rig)
                batch = rig.loop.scheduler.next_execution_plan().batch
                rig.flying.append(batch) if batch is not None else None
            hit_submit, hit_admit, left = admitted(rig, "again", again)
        if not SHORT_TAIL <= left <= SHORT_TAIL + block + 1:
            raise SystemExit(f"the second prompt has {left} tokens to compute")
        for column, value in zip(columns.values(), (submit, admit, hit_submit, hit_admit), strict=True):
            column.append(value)
    return long_figures(ENGINE, block, columns)


def long_figures(engine: str, block: int, columns: LongPrompt) -> list[Figures]:
    """A row for the miss and one for the hit; ``median_us`` and ``min_us`` are of submit and admit together."""
    rows: list[Figures] = []
    for what, before in (("long prompt, miss", ""), ("long prompt, hit", "hit_")):
        submit, admit = columns[before + "submit"], columns[before + "admit"]
        both = spread([one + other for one, other in zip(submit, admit, strict=True)])
        parts = {"submit_us": spread(submit)["median_us"], "admit_us": spread(admit)["median_us"]}
        shape = {"engine": engine, "what": what, "n": 1, "context": LONG, "block": block}
        rows.append({**shape, "median_us": both["median_us"], "min_us": both["min_us"], **parts})
    return rows


def arrival_row(block: int, repeats: int = 5) -> Figures:
    """The longest round of `BUSY` decodes while a long prompt arrives on another thread and is computed.

    ``median_us`` and ``min_us`` are of `repeats` such arrivals, ``usual_us`` is the round before them.
    ``cpu_median_us`` counts the loop's own work alone; wall time adds what the other thread's hold of the
    interpreter and the machine cost.
    """
    walls, cpus, usual = [], [], []
    for seed in range(repeats):
        rig = busy_rig(block)
        frames = FrontendCodec(layouts=LAYOUTS).encode(
            request("long", tokens(np.random.default_rng(seed), LONG), max_new=32)
        )
        timer = Timer()
        with quiet():
            timer.run(rig.loop.round, 32)
            usual.append(statistics.median(timer.wall))
            timer = Timer()
            wire = threading.Thread(target=partial(arrive, rig, frames))
            wire.start()
            while rig.loop.scheduler.sizes().decoding <= BUSY:
                timer.run(rig.loop.round, 1)
            wire.join()
        walls.append(max(timer.wall))
        cpus.append(max(timer.cpu))
    return {
        "engine": ENGINE,
        "what": "longest round",
        "n": BUSY,
        "context": 512,
        "block": block,
        "median_us": round(statistics.median(walls) / 1000, 1),
        "min_us": round(min(walls) / 1000, 1),
        "cpu_median_us": round(statistics.median(cpus) / 1000, 1),
        "usual_us": round(statistics.median(usual) / 1000, 1),
    }


def arrive(rig: Rig, frames: tuple[bytes, bytes]) -> None:
    """What the wire thread does with a request's frames."""
    message = EngineCodec().decode(frames).message
    if not isinstance(message, GenerateRequest):
        raise SystemExit("the frames of a long prompt were refused")
    rig.link.inbox.append(message)


def busy_rig(block: int) -> Rig:
    rig = open_rig(seats=BUSY + 1, max_len=LONG + 2048, block=block, batched=2048 + BUSY, chunk=2048)
    rng = np.random.default_rng(5)
    for i in range(BUSY):
        rig.link.inbox.append(request(f"request-{i:06d}", tokens(rng, 512), max_new=1024))
    rig.settle(BUSY)
    return rig


# ---- all of it ----------------------------------------------------------------------------------


def measure(ns: Sequence[int], blocks: Sequence[int], peers: Peers) -> Iterator[Figures]:
    """Rows as they are done."""
    for block in blocks:
        for n in ns:
            say(f"block {block}: {n} running in lockstep")
            yield from round_rows(n, 512, block, staggered=False, peers=peers)
        for n in ns:
            if n in (64, 256):
                say(f"block {block}: {n} running, staggered")
                yield from round_rows(n, 512, block, staggered=True)
        say(f"block {block}: lengths of context, long prompts")
        yield from flat_rows(block)
        yield from long_rows(block)
        for engine, found in peers.each(lambda peer: peer.long_prompt(block=block, length=LONG)).items():  # noqa: B023 (called at once)
            if found:
                yield from long_figures(engine, block, found)
        yield arrival_row(block)
    say("waiting requests")
    yield from waiting_rows()


def listed(rows: Iterable[Figures]) -> None:
    """A JSON list, a row a line."""
    before = "["
    for row in rows:
        print(before, json.dumps(row), sep="\n", end="", flush=True)
        before = ","
    print("\n]")


def shown(rows: Iterable[Figures]) -> None:
    """A table a kind of row; peers with their ratio to ours."""
    ours: dict[tuple[object, ...], float] = {}
    kind = None
    for row in rows:
        shape = {key: value for key, value in row.items() if key not in ("engine", "what") and not key.endswith("_us")}
        times = {key.removesuffix("_us"): value for key, value in row.items() if key.endswith("_us")}
        if row["what"] != kind:
            kind = row["what"]
            print(f"\n{kind}, µs")
        key, median, ratio = (kind, *shape.values()), float(str(row["median_us"])), ""
        if row["engine"] == ENGINE:
            ours[key] = median
        elif row["engine"] != LOOP and key in ours:
            ratio = f"  = {median / ours[key]:.2f} of ours"
        left = "  ".join(f"{name} {value}" for name, value in shape.items())
        found = "  ".join(f"{name} {value}" for name, value in times.items()) + ratio
        print(f"  {left:<36} {row['engine']:<28}", found, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, nargs="*", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--block", type=int, nargs="*", default=[64, 16])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peers", action="store_true", help="run the peers whose interpreters are given")
    parser.add_argument("--tokenspeed-python", metavar="PATH", help="interpreter with tokenspeed-scheduler")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter with vllm")
    parser.add_argument("--nano-vllm-python", metavar="PATH", help="interpreter with nano-vllm-fork")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    pythons = {
        "tokenspeed_scheduler_driver": args.tokenspeed_python,
        "vllm_driver": args.vllm_python,
        "nano_vllm_driver": args.nano_vllm_python,
    }
    with open_peers(pythons if args.peers else {}) as peers:
        rows = measure(args.n, args.block, peers)
        if args.json:
            listed(rows)
        else:
            print(machine(), flush=True)
            shown(rows)


if __name__ == "__main__":
    main()
