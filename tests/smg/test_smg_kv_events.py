"""Events of the prefix cache through SMG's gRPC servicer to those who subscribe there."""

from __future__ import annotations

from pathlib import Path

import pytest
from smg_rig import MODEL, gateway, until
from smg_servicer import BLOCK, servicer

from tokenspeed.settings.choices import KvEventFormat

PAGES = 16
PROMPTS = [[20 * at + 1 + i for i in range(4 * BLOCK + 6)] for at in range(8)]  # twice what the pool holds


@pytest.mark.contract("KM-1", "KM-2", "PT-12")
@pytest.mark.parametrize("event_format", KvEventFormat)
def test_a_subscriber_of_the_servicer_knows_what_is_cached_whenever_it_came(
    tmp_path: Path, event_format: KvEventFormat
) -> None:
    with servicer(tmp_path, event_format, pool_tokens=PAGES * BLOCK) as front:
        with front.subscribed() as mirror:
            for at, prompt in enumerate(PROMPTS):
                assert front.generate(f"r{at}", prompt).cached_tokens == 0
            until(lambda: mirror.cached(PROMPTS[-1]) == 4 * BLOCK, "the last prompt's blocks")
            assert len(mirror.blocks) <= PAGES
            cached = [mirror.cached(prompt) for prompt in PROMPTS]
            assert cached[0] == 0  # evicted
            with front.subscribed() as late:
                until(lambda: late.blocks == mirror.blocks, "the same blocks at a subscriber that came late")
            for at in (-1, 0):
                assert front.generate(f"again{at}", PROMPTS[at]).cached_tokens == cached[at]
            until(lambda: mirror.cached(PROMPTS[0]) == 4 * BLOCK, "the blocks that were computed again")
            front.flush()
            until(lambda: mirror.cleared, "the flush")
            assert (mirror.cleared, mirror.blocks) == (1, {})
            assert front.generate("after", PROMPTS[0]).cached_tokens == 0


def test_the_gateway_serves_through_the_servicer_and_hears_its_events(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "two blocks of tokens, of sixteen each", "max_tokens": 8, "temperature": 0}
    with servicer(tmp_path, KvEventFormat.MAPS, pool_tokens=PAGES * BLOCK) as below:
        with gateway(tmp_path, "--policy", "cache_aware", servicer=below.address) as front:
            front.ready()
            for cached in (0, 2 * BLOCK):
                answer = front.http.post("/v1/completions", json={**body, "ignore_eos": True})
                assert answer.status_code == 200, answer.text
                usage = answer.json()["usage"]
                assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (8, cached)
            assert f"block_size={BLOCK}" in front.process.says("Learned block_size from KV event")
