"""Sampling defaults that come with a checkpoint."""

from __future__ import annotations

from tokenspeed.checkpoint.facts import Facts
from tokenspeed.plane.messages import SamplingParams


def generation_from_hf(facts: Facts) -> SamplingParams:
    """Defaults of ``generation_config.json``; keys that are missing leave the engine's own.

    ``do_sample: false``, where written, means greedy.

    Raises: ModelError: a value that no request could have either.
    """
    temperature = _at_least_zero(facts, "temperature")
    if facts.get("do_sample") is False:
        temperature = 0.0
    return SamplingParams(
        max_new_tokens=None if facts.get("max_new_tokens") is None else facts.count("max_new_tokens"),
        temperature=temperature,
        top_p=_share(facts, "top_p"),
        top_k=_whole(facts, "top_k"),
        min_p=_at_least_zero(facts, "min_p", most=1.0),
        repetition_penalty=_positive(facts, "repetition_penalty"),
    )


def generation_from_gguf(facts: Facts) -> SamplingParams:
    """Defaults of the ``general.sampling.*`` keys, which some GGUF files have."""
    return SamplingParams(
        temperature=_at_least_zero(facts, "general.sampling.temp"),
        top_p=_share(facts, "general.sampling.top_p"),
        top_k=_whole(facts, "general.sampling.top_k"),
        min_p=_at_least_zero(facts, "general.sampling.min_p", most=1.0),
        repetition_penalty=_positive(facts, "general.sampling.penalty_repeat"),
    )


def _positive(facts: Facts, key: str) -> float | None:
    return None if facts.get(key) is None else facts.number(key)


def _at_least_zero(facts: Facts, key: str, *, most: float = 1e6) -> float | None:
    value = facts.get(key)
    if value is None:
        return None
    number = 0.0 if value == 0 else facts.number(key)
    if number > most:
        raise facts.fail(key, value, f"0 to {most:g} is possible")
    return number


def _share(facts: Facts, key: str) -> float | None:
    number = _positive(facts, key)
    if number is not None and number > 1.0:
        raise facts.fail(key, number, "above 0 and up to 1 is possible")
    return number


def _whole(facts: Facts, key: str) -> int | None:
    value = facts.get(key)
    if value is None:
        return None
    if type(value) is not int or not -1 <= value < 1 << 31:
        raise facts.fail(key, value, "a whole number is needed; 0 or -1 is no limit")
    return value
