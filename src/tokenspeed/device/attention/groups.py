"""Which cache groups the layers of a model form."""

from __future__ import annotations

import attrs

from tokenspeed.checkpoint.config import LinearAttention, ModelConfig
from tokenspeed.device.kv.layout import FLOAT_BYTES, STATE, WINDOW, CacheGroup, attention_group

FULL_GROUP, WINDOW_GROUP = 0, 1
"""Numbers of the groups of a model with window layers."""

SNAPSHOT_PAGES = 4
"""Pages of tokens between two snapshots of a prompt's state, which is as large as many tokens' keys and values."""

STATE_ALIGNMENT = 64


def attention_groups(config: ModelConfig, page_tokens: int, *, number_bytes: int) -> tuple[CacheGroup, ...]:
    """One group of full attention; behind it that of window layers, and that of layers with linear attention.

    Args:
        page_tokens: tokens of a block, in every group.
        number_bytes: of one number of a key or value.
    """
    (whole,) = attention_group(config, page_tokens, number_bytes=number_bytes)
    groups = [attrs.evolve(whole, layers=config.full_layers)]
    if config.window_layers and config.sliding_window is not None:
        window = config.sliding_window
        groups.append(attrs.evolve(whole, name=WINDOW, kind=WINDOW, layers=config.window_layers, window_tokens=window))
    if config.linear is not None:
        groups.append(state_group(config.linear, page_tokens))
    return tuple(groups)


def state_group(linear: LinearAttention, page_tokens: int) -> CacheGroup:
    """What the linear layers keep: a block is their states behind one token, float32."""
    return CacheGroup(
        name=STATE,
        kind=STATE,
        block_tokens=SNAPSHOT_PAGES * page_tokens,
        layers=linear.layers,
        layer_bytes=linear.heads * linear.key_dim * linear.value_dim * FLOAT_BYTES,
        multiple_of=STATE_ALIGNMENT,
    )
