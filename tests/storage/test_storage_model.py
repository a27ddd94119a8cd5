"""The default model over a folder: a prompt's pages outlive their engine and give the tokens of a cold run."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from ops_rig import greedy, hand_rank
from stored_ranks import come_to_rest, stored_settings

from tokenspeed.settings.model import CacheSettings, ModelSettings

PROMPT = [(at * 1009) % 40_000 + 100 for at in range(150)]
WHOLE_PAGES = 144


@pytest.mark.model
def test_the_default_models_prompt_comes_back_from_the_folder_with_the_same_tokens(tmp_path: Path) -> None:
    settings = attrs.evolve(
        stored_settings(tmp_path), model=ModelSettings(max_len_tokens=256), cache=CacheSettings(host_gib=0.05)
    )
    with hand_rank(settings) as rank:
        (cold,) = rank.run(greedy("a", PROMPT))
        assert rank.cached("a") == 0
        come_to_rest(rank)
    with hand_rank(settings) as rank:
        assert rank.run(greedy("b", PROMPT)) == [cold]
        assert rank.cached("b") == WHOLE_PAGES
        # A longer prompt that begins alike has as much of it, from the host tier by now, and others nothing.
        rank.run(greedy("c", [*PROMPT[:100], *range(200, 260)]), greedy("d", PROMPT[1:]))
        assert (rank.cached("c") >= 96, rank.cached("d")) == (True, 0)
        come_to_rest(rank)
