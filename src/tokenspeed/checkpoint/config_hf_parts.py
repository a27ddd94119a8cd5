"""What the families' ``config.json`` say alike: rotary scaling and number format."""

from __future__ import annotations

import attrs

from tokenspeed.checkpoint.config import RopeKind, RopeScaling, yarn_mscale
from tokenspeed.checkpoint.facts import Facts

_DTYPES = ("float32", "bfloat16", "float16")


def stored_dtype(facts: Facts) -> str:
    name = facts.get("torch_dtype") or facts.get("dtype") or "float32"
    if name not in _DTYPES:
        raise facts.fail("torch_dtype", name, f"supported are {', '.join(_DTYPES)}")
    return str(name)


def rope_of(outer: Facts, positions: int) -> tuple[float, RopeScaling | None]:
    """Both spellings: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters`` with theta inside."""
    key = "rope_parameters" if outer.get("rope_parameters") is not None else "rope_scaling"
    raw = outer.get(key)
    theta = outer.number("rope_theta", 10000.0)
    if raw is None:
        return theta, None
    if not isinstance(raw, dict):
        raise outer.fail(key, raw, "an object is needed")
    inner = Facts(raw={f"{key}.{name}": value for name, value in raw.items()}, where=outer.where, prefix=f"{key}.")
    if inner.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0)) != 1.0:
        raise inner.fail("partial_rotary_factor", "below 1", "only rotation of the whole head is supported")
    if inner.get("original_max_position_embeddings") is None and outer.get("original_max_position_embeddings"):
        original = outer.count("original_max_position_embeddings")
        inner = attrs.evolve(inner, raw={**inner.raw, f"{key}.original_max_position_embeddings": original})
    return inner.number("rope_theta", theta), scaling_of(inner, positions)


def scaling_of(facts: Facts, positions: int) -> RopeScaling | None:
    kind = facts.get("rope_type") or facts.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=RopeKind.LINEAR, factor=facts.number("factor"))
    if kind == "llama3":
        low, high = facts.number("low_freq_factor"), facts.number("high_freq_factor")
        if low >= high:
            raise facts.fail("high_freq_factor", high, f"it has to be above low_freq_factor, {low}")
        return RopeScaling(
            kind=RopeKind.LLAMA3,
            factor=facts.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=facts.count("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(facts, facts.count("original_max_position_embeddings", positions))
    raise facts.fail("rope_type", kind, "supported are default, linear, llama3 and yarn")


def _yarn(facts: Facts, original: int) -> RopeScaling:
    factor = facts.number("factor")
    if facts.get("attention_factor") is not None:
        attention = facts.number("attention_factor")
    elif facts.get("mscale") and facts.get("mscale_all_dim"):
        attention = yarn_mscale(factor, facts.number("mscale")) / yarn_mscale(factor, facts.number("mscale_all_dim"))
    else:
        attention = yarn_mscale(factor)
    return RopeScaling(
        kind=RopeKind.YARN,
        factor=factor,
        original_max_positions=original,
        beta_fast=facts.number("beta_fast", 32.0),
        beta_slow=facts.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=facts.flag("truncate", default=True),
    )
