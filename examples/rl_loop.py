"""One step of reinforcement learning: roll out, put the policy's new weights in, roll out again.

    python examples/rl_loop.py [MODEL] [UPDATED]

MODEL is what the engine starts with, UPDATED what a trainer saved: a folder of safetensors, or, as by
default, other random weights of the same tiny model. A server does the same over HTTP, by routes of the
same names (docs/operations.md).
"""

from __future__ import annotations

import sys

import attrs

import tokenspeed
from tokenspeed.settings.model import DeviceSettings, ModelSettings, Settings

PROMPTS = ["Two plus two is", "The sun rises in the", "A long time ago"]
SAMPLING = tokenspeed.SamplingOptions(max_tokens=16, temperature=1.0, seed=7, logprobs=0)


@attrs.frozen(kw_only=True)
class Sample:
    """What a trainer keeps of one rollout: tokens, their log-probabilities, and the weights they came from."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: str


def rollout(engine: tokenspeed.Engine) -> list[Sample]:
    return [
        Sample(
            token_ids=done.token_ids,
            logprobs=tuple(entry.logprob for entry in done.choices[0].logprobs),
            weight_version=done.choices[0].weight_version,
        )
        for done in engine.generate(PROMPTS, SAMPLING)
    ]


def settings_for(model: str) -> Settings:
    return Settings(
        model=ModelSettings(source=model, max_len_tokens=256), device=DeviceSettings(threads=1, kv_pool_tokens=2048)
    )


def main(model: str = "random:tiny-llama", updated: str = "random:tiny-llama@2") -> tuple[list[Sample], list[Sample]]:
    """The rollouts before and after; raises if the second is not what a fresh engine on `updated` says."""
    with tokenspeed.Engine(settings_for(model)) as engine:
        before = rollout(engine)
        engine.control("pause_generation", mode="wait")
        engine.control("update_weights_from_disk", model_path=updated, weight_version="step-1")
        engine.control("flush_cache", timeout_s=10)
        engine.control("continue_generation")
        after = rollout(engine)
    with tokenspeed.Engine(settings_for(updated)) as fresh:
        expected = rollout(fresh)
    if [(s.token_ids, s.logprobs) for s in after] != [(s.token_ids, s.logprobs) for s in expected]:
        raise AssertionError("the updated engine and a fresh one differ")
    return before, after


if __name__ == "__main__":
    for sample in (found for part in main(*sys.argv[1:]) for found in part):
        print(sample.weight_version, sample.token_ids[:8], [round(value, 3) for value in sample.logprobs[:4]])
