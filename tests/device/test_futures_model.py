"""A model with weights through the whole engine: the futures executor gives the tokens of the streams executor."""

from __future__ import annotations

import attrs
import pytest
from greedy_reference import read_prompts
from matrix_rig import Flows, Shown

import tokenspeed
from tokenspeed.compose.engine import rank_engine
from tokenspeed.frontend.options import SamplingOptions
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.settings.model import (
    Backend,
    DeviceSettings,
    Executor,
    ModelSettings,
    SchedulerSettings,
    Settings,
    SimulatedSettings,
)
from tokenspeed.testing import RecordingLink

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


LONG = 200


def long_answers(executor: Executor) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of four answers of the default model, and how the steps got their ids."""
    shown = Shown()
    settings = Settings(
        device=DeviceSettings(kv_pool_tokens=2048, executor=executor),
        scheduler=SchedulerSettings(max_num_seqs=4, max_batched_tokens=256, chunk_tokens=256),
    )
    link, sampling = RecordingLink(), SamplingParams(max_new_tokens=LONG, temperature=0.0, ignore_eos=True)
    prompts = [prompt for prompt in read_prompts("smollm2-135m-q4_1.json") if len(prompt.ids) < 60][:4]
    with rank_engine(settings, connect=lambda info, wakeup: link, meter=Flows(shown=shown)) as engine:
        for prompt in prompts:
            ids = frozen_tokens(prompt.ids)
            link.put(GenerateRequest(rid=prompt.rid, input_ids=ids, sampling=sampling))
        while not all(link.finish(prompt.rid) for prompt in prompts):
            engine.loop.round()
    return [link.tokens(prompt.rid) for prompt in prompts], attrs.asdict(shown)


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.contract("AF-8", "AF-33", "AF-6")
def test_long_answers_of_the_default_model_are_asynchronous_in_19_of_20_steps_with_the_same_tokens() -> None:
    expected, without = long_answers(Executor.STREAMS)
    tokens, steps = long_answers(Executor.FUTURES)
    assert tokens == expected
    assert {len(answer) for answer in tokens} == {LONG}
    assert steps["async_steps"] >= 0.95 * (steps["async_steps"] + steps["sync_fallback_steps"])
    assert steps["async_steps"] >= LONG - 10
    assert without["async_steps"] == without["sync_fallback_steps"] == 0
