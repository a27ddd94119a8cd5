"""The whole engine in front of a simulated accelerator: more requests than a test could compute."""

from __future__ import annotations

import pytest

import tokenspeed
from tokenspeed.frontend.options import SamplingOptions
from tokenspeed.settings.model import (
    Backend,
    DeviceSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    SimulatedSettings,
)
from tokenspeed.testing import hash_continuation


@pytest.mark.parametrize("overlap", [False, True], ids=["depth-0", "depth-1"])
def test_a_thousand_requests_of_a_large_model_get_their_tokens(overlap: bool) -> None:
    settings = Settings(
        model=ModelSettings(source="random:llama-8b", max_len_tokens=4096),
        device=DeviceSettings(backend=Backend.SIMULATED),
        simulated=SimulatedSettings(step_ms=1.0),
        scheduler=SchedulerSettings(
            max_num_seqs=256, max_batched_tokens=4096, chunk_tokens=64, max_waiting=2000, overlap=overlap
        ),
    )
    prompts = [[i % 256, i // 256, *range(5 + i % 90)] for i in range(1000)]
    with tokenspeed.Engine(settings) as engine:
        done = engine.generate(prompts, SamplingOptions(max_tokens=4, temperature=0.0, ignore_eos=True))
    vocab = 264  # the preset's tokenizer
    assert [list(one.token_ids) for one in done] == [hash_continuation(p, 4, vocab_size=vocab) for p in prompts]
