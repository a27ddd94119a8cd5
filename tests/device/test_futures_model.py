"""A model with weights through the whole engine: the futures executor gives the tokens of the streams executor."""

from __future__ import annotations

import pytest

import tokenspeed
from tokenspeed.frontend.options import SamplingOptions
from tokenspeed.settings.model import (
    Backend,
    DeviceSettings,
    Executor,
    ModelSettings,
    SchedulerSettings,
    Settings,
    SimulatedSettings,
)

PROMPTS = [[(7 * i + j) % 256 for j in range(3 + 5 * i)] for i in range(12)]


def answers(executor: Executor, *, temperature: float, **switches: bool) -> list[tuple[object, ...]]:
    settings = Settings(
        model=ModelSettings(source="random:tiny-llama"),
        device=DeviceSettings(
            executor=executor,
            kv_pool_tokens=2048,
            memory_gib=0.5,
            threads=1,
            async_scheduling=switches.get("async_scheduling", True),
        ),
        scheduler=SchedulerSettings(
            max_num_seqs=4, max_batched_tokens=48, chunk_tokens=16, overlap=switches.get("overlap", True)
        ),
    )
    options = SamplingOptions(
        max_tokens=24, temperature=temperature, seed=3, ignore_eos=True, logprobs=2, presence_penalty=0.5
    )
    with tokenspeed.Engine(settings) as engine:
        done = engine.generate(PROMPTS, options)
    return [tuple(choice.token_ids) for one in done for choice in one.choices]


@pytest.mark.contract("AF-6", "DO-5")
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_every_executor_and_depth_gives_the_same_answers(temperature: float) -> None:
    expected = answers(Executor.STREAMS, temperature=temperature)
    assert len(expected) == len(PROMPTS)
    assert answers(Executor.FUTURES, temperature=temperature) == expected
    assert answers(Executor.FUTURES, temperature=temperature, overlap=False) == expected
    assert answers(Executor.FUTURES, temperature=temperature, async_scheduling=False) == expected


def test_the_futures_executor_serves_a_thousand_requests_of_a_simulated_large_model() -> None:
    def tokens(executor: Executor) -> list[tuple[int, ...]]:
        settings = Settings(
            model=ModelSettings(source="random:llama-8b", max_len_tokens=4096),
            device=DeviceSettings(backend=Backend.SIMULATED, executor=executor),
            simulated=SimulatedSettings(step_ms=0.5),
            scheduler=SchedulerSettings(max_num_seqs=256, max_batched_tokens=4096, max_waiting=2000),
        )
        prompts = [[i % 256, i // 256, *range(5 + i % 90)] for i in range(1000)]
        with tokenspeed.Engine(settings) as engine:
            done = engine.generate(prompts, SamplingOptions(max_tokens=1 + 3, temperature=0.0, ignore_eos=True))
        return [tuple(one.token_ids) for one in done]

    assert tokens(Executor.FUTURES) == tokens(Executor.STREAMS)
