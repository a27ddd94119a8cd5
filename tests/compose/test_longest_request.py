"""A pool of several cache groups serves the longest request that its size was planned for."""

from __future__ import annotations

import pytest

from tokenspeed.compose.engine import rank_engine
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.settings.model import DeviceSettings, Forward, ModelSettings, SchedulerSettings, Settings
from tokenspeed.testing import RecordingLink

NEW_TOKENS = 20


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-hybrid", "tiny-gemma3"])
@pytest.mark.parametrize(("chunk", "overlap"), [(16, True), (16, False), (256, True)])
def test_the_longest_request_alone_fills_the_pool_and_is_served(model: str, chunk: int, overlap: bool) -> None:
    settings = Settings(
        model=ModelSettings(source=f"random:{model}"),
        device=DeviceSettings(memory_gib=0.25, kv_pool_tokens=400, forward=Forward.TORCH),
        scheduler=SchedulerSettings(max_num_seqs=1, max_batched_tokens=256, chunk_tokens=chunk, overlap=overlap),
    )
    link = RecordingLink()
    with rank_engine(settings, connect=lambda info, wakeup: link) as engine:
        loop = engine.loop
        longest = loop.table.max_len
        assert 400 <= longest <= 432
        for rid in ("first", "second"):  # the second evicts what the first left
            ids = [len(rid) + at % 250 for at in range(longest - NEW_TOKENS)]
            sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
            link.put(GenerateRequest(rid=rid, input_ids=frozen_tokens(ids), sampling=sampling))
            while not link.finish(rid):
                loop.round()
            assert len(link.tokens(rid)) == NEW_TOKENS
