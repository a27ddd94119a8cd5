"""What the KV pool takes when nobody said how much."""

from __future__ import annotations

import attrs
import pytest
from device_doubles import one_group

from tokenspeed.device.memory import GIB, UNASKED_POOL_BYTES, Budget, ModelNeeds, plan_memory
from tokenspeed.settings.model import DeviceSettings, Settings

NEEDS = ModelNeeds(weights_bytes=GIB, layout=one_group(1 << 20), scratch_per_page=0, max_positions=8192)


@pytest.mark.parametrize(("memory_gib", "pages"), [(None, UNASKED_POOL_BYTES >> 20), (48.0, 64 * 512 + 1)])
def test_without_a_budget_the_pool_stays_small_and_with_one_it_is_used(memory_gib: float | None, pages: int) -> None:
    settings = Settings(device=DeviceSettings(memory_gib=memory_gib))
    plan = plan_memory(settings, Budget(total_bytes=48 * GIB, why="test"), NEEDS, working=0)
    assert plan.num_pages == pages


def test_one_longest_request_always_fits_the_default_pool_if_the_budget_allows() -> None:
    wide = attrs.evolve(NEEDS, layout=one_group(32 << 20))
    plan = plan_memory(Settings(), Budget(total_bytes=48 * GIB, why="test"), wide, working=0)
    assert plan.max_model_len == 8192
