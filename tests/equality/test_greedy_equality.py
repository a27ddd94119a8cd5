"""Greedy tokens of the default model equal the reference's, whatever depth, caching and chunking do.

A covering array of four runs over depth 0 and 1, prefix cache on and off, chunks of 16 and 256
tokens. All prompts are in one engine, arriving at random rounds; some arrive twice, so that the runs
with a prefix cache have hits. Counters show that no run was vacuous.
"""

from __future__ import annotations

import attrs
import pytest
from greedy_reference import differences, drive, read_prompts

from tokenspeed.compose.engine import rank_engine
from tokenspeed.plane.messages import OutputBatch
from tokenspeed.settings.model import CacheSettings, DeviceSettings, SchedulerSettings, Settings, WeightsMode
from tokenspeed.testing import RecordingLink

REFERENCE = "smollm2-135m-q4_1.json"
NEW_TOKENS = 64

RUNS = [
    pytest.param(0, True, 16, id="depth 0, prefix, chunks of 16"),
    pytest.param(0, False, 256, id="depth 0, no prefix, chunks of 256"),
    pytest.param(1, True, 256, id="depth 1, prefix, chunks of 256"),
    pytest.param(1, False, 16, id="depth 1, no prefix, chunks of 16"),
]


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.contract("DO-5", "SP-48")
@pytest.mark.parametrize(("depth", "prefix", "chunk"), RUNS)
def test_greedy_tokens_equal_the_reference(
    depth: int, prefix: bool, chunk: int, record_property: pytest.RecordProperty
) -> None:
    settings = Settings(
        device=DeviceSettings(kv_pool_tokens=20_480, weights=WeightsMode.EXACT),  # what the margin is for
        scheduler=SchedulerSettings(max_num_seqs=32, max_batched_tokens=512, chunk_tokens=chunk, overlap=depth == 1),
        cache=CacheSettings(prefix=prefix),
    )
    link, wanted = RecordingLink(), read_prompts(REFERENCE)
    with rank_engine(settings, connect=lambda info, wakeup: link) as engine:
        counters = drive(engine, link, wanted, seed=depth * 2 + prefix)
        sizes, pool = engine.loop.scheduler.sizes(), engine.loop.scheduler
        assert sizes.held == 0
        assert pool.available_lcm_blocks() == pool.num_usable_pages
    found, excused = differences(wanted, link)
    for name, value in attrs.asdict(counters).items():
        record_property(name, value)
    record_property("excused", excused)
    assert not found
    assert excused <= 2
    assert all(len(link.tokens(prompt.rid)) == NEW_TOKENS for prompt in wanted)
    assert (counters.overlapped > 50) == (depth == 1)
    assert (counters.cached_tokens >= 16) == prefix
    assert isinstance(link.sent[0], OutputBatch)
    if depth == 1:
        assert counters.mixed > 0
        assert counters.partial_chunks > 0
