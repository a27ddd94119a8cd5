"""A control plane over a scripted data plane, and the clocks: what the round benchmarks share."""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import numpy as np

from tokenspeed.compose.control import ControlContainer
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.plane.messages import (
    ControlReply,
    FrontendMessage,
    GenerateRequest,
    Int32Array,
    OutputBatch,
    SamplingParams,
    frozen_tokens,
)
from tokenspeed.plane.plan import ForwardBatch
from tokenspeed.plane.results import ForwardResult, KvEvent
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs
from tokenspeed.settings.model import CacheSettings, SchedulerSettings, Settings
from tokenspeed.testing import HandWakeup, ScriptedPlane

VOCAB = 32000
TOKEN = 7
WARM_ROUNDS = 16

clock = time.perf_counter_ns
cpu_clock = time.thread_time_ns


@attrs.define(eq=False)
class DroppingLink:
    """A frontend that sends what it is given and throws answers away, counting tokens."""

    inbox: list[FrontendMessage] = attrs.field(factory=list)
    tokens: int = 0
    gone: bool = False

    def receive(self) -> tuple[FrontendMessage, ...]:
        messages = tuple(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, batch: OutputBatch) -> None:
        self.tokens += len(batch.output_ids)

    def reply(self, reply: ControlReply) -> None:
        return None

    def close(self) -> None:
        return None


@attrs.define(eq=False)
class CountingSink:
    """A subscriber of cache events that only counts them."""

    events: int = 0

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        self.events += len(events)

    def close(self) -> None:
        return None


def answer(batch: ForwardBatch) -> list[int]:
    return [TOKEN] * int(np.count_nonzero(batch.samples))


@attrs.define(eq=False)
class Rig:
    """A loop, its link and its sink (None: nobody subscribes to cache events)."""

    loop: EventLoop
    link: DroppingLink
    sink: CountingSink | None
    flying: deque[ForwardBatch] = attrs.field(factory=deque)

    def settle(self, running: int) -> None:
        """Rounds until `running` requests decode, and some more."""
        while self.loop.scheduler.sizes().decoding < running:
            self.loop.round()
        for _ in range(WARM_ROUNDS):
            self.loop.round()

    def take_over(self) -> None:
        """From here on `decode_round` is the loop: the forwards in flight are its own."""
        while self.loop.state.in_flight:
            flight = self.loop.state.in_flight.popleft()
            self.loop.plane.commit(flight.ticket)
            self.flying.append(flight.batch)

    def decode_round(self, result: ForwardResult) -> OutputBatch | None:
        """Plan, commit the forward before, advance, output batch: a round without loop, plane and load."""
        loop = self.loop
        self.flying.append(loop.scheduler.next_execution_plan().batch)
        loop.scheduler.advance((loop.output.commit(self.flying.popleft(), result),))
        loop.kv_events.publish(loop.scheduler.drain_kv_events())
        return loop.output.take(None)


def open_rig(
    *, seats: int, max_len: int, block: int, batched: int, chunk: int, events: bool = False, waiting: int = 0
) -> Rig:
    """A control plane for `seats` residents of `max_len` tokens, with pages for all of them."""
    specs = DeviceSpecs(
        backend="none",
        model_name="bench",
        dtype="float32",
        vocab_size=VOCAB,
        max_model_len=max_len,
        num_pages=64 + seats * (max_len // block + 2),
        page_tokens=block,
        groups=(CacheGroupSpec(block_tokens=block),),
        max_num_seqs=seats,
        max_batched_tokens=batched,
        eos_token_ids=(0,),
    )
    settings = Settings(
        scheduler=SchedulerSettings(
            max_num_seqs=seats,
            max_waiting=seats + waiting,
            chunk_tokens=chunk,
            max_batched_tokens=min(batched, 1 << 20),
        ),
        cache=CacheSettings(page_tokens=block),
    )
    link, plane = DroppingLink(), ScriptedPlane(answer=answer, keep_plans=False)
    sink = CountingSink() if events else None
    parts = {} if sink is None else {"kv_sink": sink}
    box = ControlContainer(settings=settings, specs=specs, plane=plane, frontend=link, wakeup=HandWakeup(), **parts)
    return Rig(loop=box.loop(), link=link, sink=sink)


def lengths_of(n: int, context: int, *, staggered: bool) -> list[int]:
    """Equal lengths fill their blocks in the same round; staggered ones about n / block in each round."""
    return [context + (7 * i) % 64 if staggered else context for i in range(n)]


def running_rig(n: int, context: int, block: int, *, rounds: int, staggered: bool = False, waiting: int = 0) -> Rig:
    """`n` requests that decode at depth 1, their prompts computed in one forward, `waiting` more behind them."""
    lengths = lengths_of(n, context, staggered=staggered)
    max_len = max(lengths) + rounds + 256
    total = sum(lengths)
    rig = open_rig(
        seats=n, max_len=max_len, block=block, batched=total, chunk=max(lengths), events=staggered, waiting=waiting
    )
    rng = np.random.default_rng(1)
    for i, length in enumerate(lengths):
        rig.link.inbox.append(request(f"request-{i:06d}", tokens(rng, length), max_new=rounds + 200))
    rig.settle(n)
    for i in range(waiting):
        rig.link.inbox.append(request(f"waiting-{i:06d}", tokens(rng, 64), max_new=8))
    rig.loop.round()
    return rig


def tokens(rng: np.random.Generator, length: int) -> Int32Array:
    return frozen_tokens(rng.integers(1, VOCAB, size=length))


def request(rid: str, ids: Int32Array, *, max_new: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=max_new)
    return GenerateRequest(rid=rid, input_ids=ids, sampling=sampling)


@attrs.define(eq=False)
class Timer:
    """Wall and CPU nanoseconds of repeated calls on this thread."""

    wall: list[int] = attrs.field(factory=list)
    cpu: list[int] = attrs.field(factory=list)

    def run(self, call: Callable[[], object], rounds: int) -> None:
        for _ in range(rounds):
            cpu, wall = cpu_clock(), clock()
            call()
            self.wall.append(clock() - wall)
            self.cpu.append(cpu_clock() - cpu)

    def figures(self) -> dict[str, float]:
        """Microseconds."""
        return {**spread(self.wall), "cpu_median_us": round(statistics.median(self.cpu) / 1000, 1)}


@contextmanager
def quiet() -> Iterator[None]:
    """Without garbage collection, as a rank runs its rounds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spread(nanoseconds: Sequence[int]) -> dict[str, float]:
    us = sorted(value / 1000 for value in nanoseconds)
    return {
        "median_us": round(statistics.median(us), 1),
        "min_us": round(us[0], 1),
        "mean_us": round(statistics.fmean(us), 1),
        "p99_us": round(us[int(0.99 * (len(us) - 1))], 1),
    }
