"""One run of the equality matrix: what a combination means in settings, how it is driven, what it must show."""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Iterator

import attrs
from greedy_reference import MARGIN, Prompt

from tokenspeed.compose.engine import RankEngine
from tokenspeed.plane.messages import AbortRequest, Finish, GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.plane.plan import ExecutionPlan, HistorySeed, RestoreOp, WriteBackOp
from tokenspeed.plane.table import NO_SLOT
from tokenspeed.settings.model import (
    CacheSettings,
    DeviceSettings,
    Executor,
    Retraction,
    SchedulerSettings,
    Settings,
    WeightsMode,
    WritePolicy,
)
from tokenspeed.telemetry.meters import NullMeter
from tokenspeed.testing import RecordingLink

CHUNK, WHOLE, TOP = 16, 8192, 3
REPEATED, LEAVING = 4, 8
TOLERANCE = 1e-4


class Flow(enum.Enum):
    """The executor, and for futures whether steps are asynchronous."""

    STREAMS = "streams"
    FUTURES = "futures"
    SYNCHRONOUS = "futures, synchronous"


class Pressure(enum.Enum):
    """What becomes of a request when blocks run out."""

    NONE = "no pressure"
    RESTORE = "restored"
    RECOMPUTE = "recomputed"


@attrs.frozen(kw_only=True)
class Case:
    """One combination of the matrix; `policy` matters where images are taken."""

    flow: Flow
    depth: int
    prefix: bool
    whole: bool
    pressure: Pressure
    policy: WritePolicy = WritePolicy.WRITE_THROUGH

    def __str__(self) -> str:
        cache, prefill = "prefix" if self.prefix else "no prefix", "whole" if self.whole else "chunked"
        return f"{self.flow.value}, depth {self.depth}, {cache}, {prefill}, {self.pressure.value}"

    @property
    def possible(self) -> bool:
        """The host tier finds blocks by prefix, and the synchronous flow has nothing in flight at a commit."""
        return (self.prefix or self.pressure is not Pressure.RESTORE) and (
            self.depth == 0 or self.flow is not Flow.SYNCHRONOUS
        )

    def levels(self) -> tuple[object, ...]:
        return (self.flow, self.depth, self.prefix, self.whole, self.pressure)

    def settings(self) -> Settings:
        images = self.pressure is Pressure.RESTORE
        tight = self.pressure is not Pressure.NONE
        chain = (Retraction.SNAPSHOT,) * images + (Retraction.RECOMPUTE, Retraction.ABORT)
        return Settings(
            device=DeviceSettings(
                kv_pool_tokens=512 if tight else 20_480,
                weights=WeightsMode.EXACT,  # what the margin is for
                executor=Executor.STREAMS if self.flow is Flow.STREAMS else Executor.FUTURES,
                async_scheduling=self.flow is not Flow.SYNCHRONOUS,
            ),
            scheduler=SchedulerSettings(
                max_num_seqs=12 if tight else 32,
                max_batched_tokens=WHOLE if self.whole else 512,
                chunk_tokens=WHOLE if self.whole else CHUNK,
                overlap=self.depth == 1,
                retraction=chain,
            ),
            cache=CacheSettings(
                prefix=self.prefix,
                host_gib=0.25 if images else 0.0,
                images=3 if images else 0,
                write_policy=self.policy if images else WritePolicy.WRITE_THROUGH,
            ),
        )


@attrs.define
class Shown:
    """What a run did. Writers: `Witness`, `Flows` and `drive`, all on the thread that drives the rounds."""

    overlapped: int = 0
    mixed: int = 0
    partial_chunks: int = 0
    cached_tokens: int = 0
    retracted: int = 0
    restored: int = 0
    recomputed: int = 0
    stored: int = 0
    async_steps: int = 0
    sync_fallback_steps: int = 0
    aborted_resident: int = 0
    aborted_in_flight: int = 0


@attrs.frozen(eq=False)
class Witness:
    """A `History` that keeps no token and looks at the plan of every batch."""

    shown: Shown
    away: set[int] = attrs.field(factory=set)

    def seeds(self, plan: ExecutionPlan) -> tuple[HistorySeed, ...]:
        counts, kinds = plan.batch.counts.tolist(), Counter(type(op) for op in plan.device_ops())
        self.shown.mixed += 1 in counts and max(counts) > 1
        self.shown.partial_chunks += plan.batch.samples.tolist().count(False)
        back = self.away.intersection(plan.seated)
        self.away.difference_update(back, plan.retired)
        self.away.update(plan.preempted)
        self.shown.restored += kinds[RestoreOp]
        self.shown.recomputed += len(back) - kinds[RestoreOp]
        self.shown.stored += kinds[WriteBackOp]
        return ()


@attrs.frozen(kw_only=True, eq=False)
class Flows(NullMeter):
    """Counts retractions, and how the futures executor's steps got their ids."""

    shown: Shown

    def preempted(self, count: int) -> None:
        self.shown.retracted += count

    def committed(self, *, async_steps: int = 0, sync_fallback_steps: int = 0, **others: float) -> None:
        self.shown.async_steps += async_steps
        self.shown.sync_fallback_steps += sync_fallback_steps


def drive(engine: RankEngine, link: RecordingLink, wanted: list[Prompt], shown: Shown, *, seed: int) -> None:
    """Every prompt arrives at a random round, some a second time at the end; copies of some are aborted at random."""
    dice, loop = random.Random(seed), engine.loop

    def resident(rid: str) -> bool:
        return rid in loop.table.by_rid and int(loop.table.schedule.slot[loop.table.by_rid[rid]]) != NO_SLOT

    repeated = [prompt for prompt in wanted if len(prompt.ids) > 40][:REPEATED]
    waiting = [*wanted, *(attrs.evolve(prompt, rid=f"{prompt.rid}-leaves") for prompt in dice.sample(wanted, LEAVING))]
    dice.shuffle(waiting)
    again = [attrs.evolve(prompt, rid=f"{prompt.rid}-again") for prompt in repeated]
    leaving: list[str] = []
    while waiting or again or loop.table.live:
        while again and link.finish(again[0].rid.removesuffix("-again")):
            waiting.append(again.pop(0))
        while waiting and dice.random() < 0.4:
            prompt = waiting.pop()
            link.put(_request(prompt, logprobs=dice.random() < 0.5))
            leaving += [prompt.rid] * prompt.rid.endswith("-leaves")
        there = [rid for rid in leaving if resident(rid)]
        some = there if shown.aborted_resident < 2 else leaving
        if some and dice.random() < 0.15:
            rid = dice.choice(some)
            leaving.remove(rid)
            row = loop.table.by_rid.get(rid, -1)
            shown.aborted_resident += rid in there
            shown.aborted_in_flight += any(row in flight.batch.rows for flight in loop.state.in_flight)
            link.put(AbortRequest(rids=(rid,)))
        loop.round()
        shown.overlapped += len(loop.state.in_flight)
    shown.cached_tokens = max((cached for sent in link.sent for cached in sent.cached_tokens), default=0)


def _request(prompt: Prompt, *, logprobs: bool) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=len(prompt.expected), temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        rid=prompt.rid,
        input_ids=frozen_tokens(prompt.ids),
        sampling=sampling,
        return_logprob=logprobs,
        top_logprobs=TOP if logprobs else 0,
    )


@attrs.frozen(kw_only=True)
class Answer:
    """What one request got: tokens, their log-probabilities and the likeliest ids with theirs, [] where not asked."""

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]


def answers(link: RecordingLink) -> dict[str, Answer]:
    """Of every request that got a token, by its id."""
    got: dict[str, Answer] = {}
    for sent in link.sent:
        for at, rid in enumerate(sent.rids):
            answer = got.setdefault(rid, Answer(tokens=[], logprobs=[], top=[]))
            answer.tokens.extend(sent.output_ids[at])
            answer.logprobs.extend(sent.logprobs[at])
            answer.top.extend(dict(zip(top.ids, top.values, strict=True)) for top in sent.top_logprobs[at])
    return got


def faults(wanted: list[Prompt], link: RecordingLink) -> tuple[list[str], Counter[str]]:
    """What differs from the reference, and how much was compared and excused.

    A request is compared up to its end, or up to its first token that differs where the reference's
    margin excuses that; an aborted one up to where it was aborted.
    """
    found: list[str] = []
    count: Counter[str] = Counter()
    expected = {prompt.rid: prompt for prompt in wanted}
    for rid, answer in answers(link).items():
        prompt = expected[rid.split("-", maxsplit=1)[0]]
        aborted = link.finish(rid) is not None and link.finish(rid)[0] == Finish.ABORT
        if len(answer.tokens) != len(prompt.expected) and not (aborted and rid.endswith("-leaves")):
            found.append(f"{rid}: {len(answer.tokens)} tokens")
        for at, token in enumerate(answer.tokens):
            if token != prompt.expected[at]:
                excused = prompt.margins[at] < MARGIN
                count["excused"] += excused
                found += [] if excused else [f"{rid}[{at}]: {token} for {prompt.expected[at]}"]
                break
            count["tokens"] += 1
            if answer.logprobs:
                count["logprobs"] += 1
                found += [f"{rid}[{at}]: {fault}" for fault in _logprob_faults(answer, prompt, at)]
    return found, count


def _logprob_faults(answer: Answer, prompt: Prompt, at: int) -> Iterator[str]:
    known, top = prompt.top[at], answer.top[at]
    if abs(answer.logprobs[at] - known[prompt.expected[at]]) > TOLERANCE:
        yield f"chosen {answer.logprobs[at]} for {known[prompt.expected[at]]}"
    if len(top) != TOP:
        yield f"{len(top)} alternatives"
    least = min(known.values())
    for token, value in top.items():
        if abs(value - known.get(token, least)) > TOLERANCE:  # one that is not known ties with the last that is
            yield f"alternative {token}: {value} for {known.get(token)}"
