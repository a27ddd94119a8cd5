"""A request's tokens and log-probabilities have the same bits alone and in any company, on the native forward.

Ten requests, greedy and sampled, run one after another: one thread, whole prompts, nothing found, nothing in
flight. The same ten then run twice under random schedules: other arrivals, chunks of any size, prefixes
found, too few blocks, so that requests are computed again or come back through the host tier. Everything
a client gets is compared for equality, not closeness. Counters show that no schedule was vacuous.
"""

from __future__ import annotations

import functools
import random

import attrs
import pytest
from greedy_reference import read_prompts
from matrix_rig import Answer, Flows, Shown, Witness, answers

from tokenspeed.compose.engine import RankEngine, rank_engine
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.settings.model import (
    CacheSettings,
    DeviceSettings,
    Executor,
    Retraction,
    SchedulerSettings,
    Settings,
    WeightsMode,
)
from tokenspeed.testing import RecordingLink

NEW_TOKENS, TOP = 32, 4
RANDOMLY = SamplingParams(temperature=0.8, top_p=0.95, top_k=40)
RULES = (
    SamplingParams(temperature=0.0),
    RANDOMLY,
    attrs.evolve(RANDOMLY, top_k=None, min_p=0.02),
    attrs.evolve(RANDOMLY, temperature=1.2, repetition_penalty=1.2, presence_penalty=0.3),
)


def requests(suffix: str = "") -> list[GenerateRequest]:
    """Four begin with the same hundred tokens, the others are prompts of 5 to 150 tokens."""
    texts = read_prompts("smollm2-135m-q4_1.json")
    shared = texts[6].ids[:100]
    others = [texts[at].ids for at in (0, 4, 5, 11, 13, 16)]
    ids = [shared + texts[at].ids[: 9 + 11 * at] for at in (3, 7, 9, 15)] + others
    return [
        GenerateRequest(
            rid=f"r{number}{suffix}",
            input_ids=frozen_tokens(tokens),
            sampling=attrs.evolve(RULES[number % 4], max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=number),
            return_logprob=True,
            top_logprobs=TOP,
        )
        for number, tokens in enumerate(ids)
    ]


@functools.cache
def alone(weights: WeightsMode) -> dict[str, Answer]:
    settings = Settings(
        device=DeviceSettings(kv_pool_tokens=2048, weights=weights, threads=1),
        scheduler=SchedulerSettings(max_num_seqs=8, max_batched_tokens=512, chunk_tokens=512, overlap=False),
        cache=CacheSettings(prefix=False),
    )
    link = RecordingLink()
    with rank_engine(settings, connect=lambda info, wakeup: link) as engine:
        for request in requests():
            link.put(request)
            while not link.finish(request.rid):
                engine.loop.round()
    return answers(link)


def in_company(engine: RankEngine, link: RecordingLink, shown: Shown, dice: random.Random) -> None:
    """Twice the ten requests, at random rounds and in random orders; the second time when most have ended."""
    loop, waves = engine.loop, [requests(), requests("-again")]
    waiting: list[GenerateRequest] = []
    while waiting or waves or loop.table.live:
        if waves and not waiting and loop.table.live < 3:
            waiting = dice.sample(wave := waves.pop(0), len(wave))
        while waiting and dice.random() < 0.8:
            link.put(waiting.pop())
        loop.round()
        shown.overlapped += len(loop.state.in_flight)
    shown.cached_tokens = max(cached for sent in link.sent for cached in sent.cached_tokens)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.contract("DO-5", "SP-48", "SP-42", "CT-7")
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 11))])
@pytest.mark.parametrize("weights", [WeightsMode.NATIVE, WeightsMode.INT8G32], ids=lambda mode: mode.value)
def test_tokens_and_logprobs_have_the_bits_they_have_alone(
    weights: WeightsMode, seed: int, record_property: pytest.RecordProperty
) -> None:
    """Odd seeds compute retracted requests again, even ones bring them back from the host tier."""
    dice, images = random.Random(seed), seed % 2 == 0
    settings = Settings(
        device=DeviceSettings(
            kv_pool_tokens=272, weights=weights, threads=2, executor=dice.choice((Executor.STREAMS, Executor.FUTURES))
        ),
        scheduler=SchedulerSettings(
            max_num_seqs=8,
            max_batched_tokens=dice.randint(64, 160),
            chunk_tokens=dice.randint(7, 60),
            retraction=(Retraction.SNAPSHOT,) * images + (Retraction.RECOMPUTE, Retraction.ABORT),
        ),
        cache=CacheSettings(host_gib=0.25 * images, images=4 * images),
    )
    link, shown = RecordingLink(), Shown()
    parts = {"history": Witness(shown), "meter": Flows(shown=shown)}
    with rank_engine(settings, connect=lambda info, wakeup: link, **parts) as engine:
        in_company(engine, link, shown, dice)
    for name, value in attrs.asdict(shown).items():
        record_property(name, value)
    wanted, got = alone(weights), answers(link)
    assert len(got) == 2 * len(wanted)
    assert [rid for rid, answer in got.items() if answer != wanted[rid.removesuffix("-again")]] == []
    assert {len(answer.logprobs) for answer in got.values()} == {NEW_TOKENS}
    assert min(shown.mixed, shown.partial_chunks, shown.overlapped, shown.retracted) > 0
    assert shown.cached_tokens >= 64
    assert (shown.restored if images else shown.recomputed) > 0


def test_the_requests_of_the_comparison_differ_in_what_they_ask_for() -> None:
    asked = requests()
    assert len(asked) == 10
    assert {request.sampling.temperature for request in asked} == {0.0, 0.8, 1.2}
    assert len({bytes(request.input_ids) for request in asked}) == 10
