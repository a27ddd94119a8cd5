"""A simulated device plans memory for the model's own cache groups, and serves through all of them."""

from __future__ import annotations

import attrs
import pytest

from tokenspeed import Engine
from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.compose.offline import SamplingOptions
from tokenspeed.device.attention.groups import attention_groups
from tokenspeed.device.backends.simulated_roofline import KV_BYTES
from tokenspeed.device.build import build_device_side
from tokenspeed.device.kv.layout import cache_layout
from tokenspeed.device.specs_of import vocabulary_of
from tokenspeed.settings.model import Backend, CacheSettings, DeviceSettings, ModelSettings, SchedulerSettings, Settings
from tokenspeed.testing import hash_continuation

KINDS = {"tiny-llama": ["full"], "tiny-gemma3": ["full", "window"], "tiny-hybrid": ["full", "state"]}


def settings(name: str, **device: object) -> Settings:
    return Settings(
        model=ModelSettings(source=f"random:{name}"),
        device=DeviceSettings(backend=Backend.SIMULATED, **device),
        scheduler=SchedulerSettings(max_num_seqs=4, max_batched_tokens=64, chunk_tokens=32),
    )


@pytest.mark.parametrize("name", KINDS)
def test_the_groups_are_the_models_with_the_accelerators_numbers(name: str) -> None:
    asked, checkpoint = settings(name, kv_pool_tokens=2048), open_random_checkpoint(name, served_name=name)
    build = build_device_side(asked, checkpoint)
    build.handle.close()
    real = attention_groups(checkpoint.config, asked.cache.page_tokens, number_bytes=KV_BYTES)
    assert build.specs.groups == cache_layout(real).groups
    assert [group.kind for group in build.specs.groups] == KINDS[name]


def test_a_window_takes_what_it_holds_and_not_the_whole_context() -> None:
    """The same model, its window layers taken for ones that see everything, needs more for as many tokens."""
    checkpoint = open_random_checkpoint("tiny-gemma3", served_name="g")
    config = attrs.evolve(checkpoint.config, sliding_window=16)
    layouts = [
        cache_layout(attention_groups(of, 16, number_bytes=KV_BYTES))
        for of in (config, attrs.evolve(config, sliding_window=4096))
    ]
    small, large = (layout.parents_for(2000, flying=64) * layout.parent_bytes for layout in layouts)
    assert small < 0.7 * large


GREEDY = SamplingOptions(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_the_hash_of_the_context_through_every_group(name: str) -> None:
    """With chunks, a shared prefix, copies of states and parents that change hands in a pool too small for all."""
    asked = attrs.evolve(settings(name, kv_pool_tokens=640), cache=CacheSettings(page_tokens=8))
    shared = [3 + i % 90 for i in range(70)]
    prompts = [[*shared, *(5 + (i * 7 + j) % 80 for j in range(20 + 9 * i))] for i in range(5)]
    vocab_size = vocabulary_of(open_random_checkpoint(name, served_name=name))
    expected = [hash_continuation(prompt, 60, vocab_size=vocab_size) for prompt in prompts]
    with Engine(asked) as engine:
        for _ in range(2):
            done = engine.generate(prompts, GREEDY)
            assert [list(one.token_ids) for one in done] == expected
