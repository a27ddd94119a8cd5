"""What a model keeps of its tokens, by cache group, and how a pool is laid out for it.

A pool is a row of parents of one size. Parent p holds blocks of one group at a time: those with the
ids ``p * k .. p * k + k - 1``, k being the group's blocks per parent, one after the other. Parent 0
is the null parent: it belongs to nobody. A block holds all layers of its group, layer after layer,
then padding.
"""

from __future__ import annotations

import attrs

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.kv.parents import BlockSize, form_parents
from tokenspeed.plane.specs import CacheGroupSpec

FULL, WINDOW, STATE = "full", "window", "state"
"""Values of `CacheGroupSpec.kind`."""

FLOAT_BYTES = 4

TAIL_BLOCKS = 2
"""Blocks of an attention group without a complete hash, at most: a retraction image keeps them, or the one state."""

STATES_EACH = 2
"""State blocks one request needs at once: the running one, and a snapshot that the next copy comes from."""


@attrs.frozen(kw_only=True)
class CacheGroup:
    """What the model keeps in some of its layers. Its number is its place among the model's groups.

    Attributes:
        kind: FULL, WINDOW or STATE, see `CacheGroupSpec`.
        layers: the model's layers with such a cache, in order.
        layer_bytes: one layer of one block.
        multiple_of: bytes; the model needs blocks at multiples of it.
    """

    name: str = FULL
    kind: str = FULL
    block_tokens: int
    layers: tuple[int, ...]
    layer_bytes: int
    multiple_of: int = 1
    window_tokens: int = 0

    @property
    def block_bytes(self) -> int:
        """Without padding."""
        return len(self.layers) * self.layer_bytes


@attrs.frozen(kw_only=True)
class CacheLayout:
    """How a pool for a model's groups is divided; plain values.

    Attributes:
        parent_bytes: every parent's.
        layer_bytes: by group; a layer of a block without padding.
    """

    parent_bytes: int
    groups: tuple[CacheGroupSpec, ...]
    layer_bytes: tuple[int, ...]

    @property
    def page_tokens(self) -> int:
        """Tokens of the finest group's block."""
        return min(group.block_tokens for group in self.groups)

    @property
    def largest_layer_bytes(self) -> int:
        """Keys and values of one layer that a parent holds, at most."""
        pairs = zip(self.groups, self.layer_bytes, strict=True)
        return max(group.blocks_per_parent * each for group, each in pairs if group.kind != STATE)

    def parents_for(self, tokens: int, *, flying: int, requests: int = 1) -> int:
        """Parents that `tokens` tokens take, the null parent not counted.

        Args:
            flying: tokens of one request that may be in forwards at once; a window group holds them and
                what the first of them sees.
            requests: among which the tokens may be spread.
        """
        return sum(_parents(group, tokens, flying, requests) for group in self.groups)


def _parents(group: CacheGroupSpec, tokens: int, flying: int, requests: int) -> int:
    blocks = STATES_EACH * min(requests, tokens) if group.kind == STATE else -(-tokens // group.block_tokens)
    if group.kind == WINDOW:
        seen = -(-(group.window_tokens - 1 + flying) // group.block_tokens) + 1
        blocks = min(blocks, requests * seen)
    return -(-blocks // group.blocks_per_parent)


def attention_group(
    config: ModelConfig, page_tokens: int, *, number_bytes: int = FLOAT_BYTES
) -> tuple[CacheGroup, ...]:
    """The one group of a model whose layers all see everything; `number_bytes`: of one key's or value's number."""
    run = page_tokens * config.head_dim * number_bytes
    layers = tuple(range(config.num_layers))
    each = 2 * config.num_kv_heads * run
    return (CacheGroup(block_tokens=page_tokens, layers=layers, layer_bytes=each, multiple_of=run),)


def cache_layout(groups: tuple[CacheGroup, ...]) -> CacheLayout:
    """Pack the groups' blocks into parents. Raises: SettingsError: they do not go together."""
    sizes = tuple(BlockSize(name=g.name, nbytes=g.block_bytes, multiple_of=g.multiple_of) for g in groups)
    parents = form_parents(sizes)
    padded = zip(groups, parents.block_bytes, parents.blocks_per_parent, strict=True)
    return CacheLayout(
        parent_bytes=parents.parent_bytes,
        groups=tuple(_spec(group, nbytes, count) for group, nbytes, count in padded),
        layer_bytes=tuple(group.layer_bytes for group in groups),
    )


def _spec(group: CacheGroup, block_bytes: int, blocks_per_parent: int) -> CacheGroupSpec:
    return CacheGroupSpec(
        name=group.name,
        kind=group.kind,
        block_tokens=group.block_tokens,
        layers=len(group.layers),
        bytes_per_block=block_bytes,
        window_tokens=group.window_tokens,
        blocks_per_parent=blocks_per_parent,
        zero_new_blocks=group.kind == STATE,
        image_blocks=1 if group.kind == STATE else TAIL_BLOCKS,
    )
