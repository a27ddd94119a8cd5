"""Greedy tokens of a hybrid model through the whole rank equal a plain reference's, with too little room.

The pool holds a few requests, prompts share prefixes and come again: state snapshots are found, blocks
evicted or moved to the host tier, requests retracted and computed again or restored from an image.
Counters show that no run was vacuous.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from dense_hybrid import hybrid_logits, hybrid_tensors
from waves import drive_waves

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.compose.engine import rank_engine
from tokenspeed.plane.results import BlockRemoved
from tokenspeed.settings.model import (
    CacheSettings,
    DeviceSettings,
    Executor,
    ModelSettings,
    SchedulerSettings,
    Settings,
    WritePolicy,
)
from tokenspeed.testing import RecordingLink, RecordingSink

NEW_TOKENS, REQUESTS, SEED = 40, 10, 5
MARGIN = 1e-3
"""The reference computes in float64, the model in float32: below it, either token is right."""


def prompts() -> dict[str, list[int]]:
    """Half of them begin with one of two long prefixes."""
    rng = random.Random(SEED)
    shared = [[rng.randrange(256) for _ in range(count)] for count in (70, 133)]
    made = {}
    for number in range(REQUESTS):
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        made[f"r{number}"] = (shared[number % 2] if number % 4 < 2 else []) + own
    return made


@functools.cache
def shortfall(prompt: tuple[int, ...], got: tuple[int, ...]) -> float:
    """How far the reference's logit of a generated token is below its best one, at most."""
    checkpoint = open_random_checkpoint("tiny-hybrid", served_name="tiny")
    tensors = hybrid_tensors(checkpoint)
    logits = hybrid_logits(checkpoint.config, tensors, [*prompt, *got[:-1]])[len(prompt) - 1 :]
    chosen = logits[torch.arange(len(got)), torch.tensor(got)]
    return float((logits.max(dim=1).values - chosen).max())


@pytest.mark.timeout(300)
@pytest.mark.contract("SP-36", "SP-39", "SP-51")
@pytest.mark.parametrize(
    ("overlap", "executor", "chunk", "cache"),
    [
        pytest.param(False, Executor.STREAMS, 32, CacheSettings(), id="depth 0, streams, chunks of 32"),
        pytest.param(True, Executor.STREAMS, 50, CacheSettings(), id="depth 1, streams, chunks of 50"),
        pytest.param(True, Executor.FUTURES, 64, CacheSettings(), id="depth 1, futures, chunks of 64"),
        pytest.param(True, Executor.STREAMS, 64, CacheSettings(prefix=False), id="depth 1, no prefix cache"),
        pytest.param(
            True,
            Executor.STREAMS,
            50,
            CacheSettings(host_gib=0.01, images=3, write_policy=WritePolicy.WRITE_THROUGH),
            id="depth 1, host tier written through",
        ),
        pytest.param(
            False,
            Executor.FUTURES,
            32,
            CacheSettings(host_gib=0.01, images=3, write_policy=WritePolicy.WRITE_BACK),
            id="depth 0, futures, host tier written back",
        ),
    ],
)
def test_greedy_tokens_of_a_hybrid_model_equal_the_reference(
    overlap: bool, executor: Executor, chunk: int, cache: CacheSettings
) -> None:
    settings = Settings(
        model=ModelSettings(source="random:tiny-hybrid"),
        device=DeviceSettings(memory_gib=0.25, kv_pool_tokens=128, executor=executor),
        scheduler=SchedulerSettings(max_num_seqs=8, max_batched_tokens=96, chunk_tokens=chunk, overlap=overlap),
        cache=cache,
    )
    link, wanted, told = RecordingLink(), prompts(), RecordingSink()
    with rank_engine(settings, connect=lambda info, wakeup: link, kv_sink=told) as engine:
        again = {f"{rid}-again": ids for rid, ids in wanted.items()}
        counters = drive_waves(engine, link, [wanted, again], new_tokens=NEW_TOKENS, seed=SEED)
        scheduler = engine.loop.scheduler
        assert scheduler.sizes().held == 0
        assert scheduler.available_lcm_blocks() == scheduler.num_usable_pages
    for rid, ids in wanted.items():
        for got in (link.tokens(rid), link.tokens(f"{rid}-again")):
            assert len(got) == NEW_TOKENS
            assert shortfall(tuple(ids), tuple(got)) < MARGIN, rid
    assert sum(counters.preempted.values()) > 0
    evicted = sum(len(event.hashes) for events in told.batches for event in events if isinstance(event, BlockRemoved))
    assert (evicted > 10) == cache.prefix
    assert (counters.cached_tokens >= 64) == cache.prefix
    assert (counters.suspended > 0) == bool(cache.images)
    assert (counters.overlapped > 0) == overlap
