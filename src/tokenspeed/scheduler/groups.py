"""Cache groups: the kinds of state a model keeps for a request, and how many blocks of each it needs.

A request has one block table a group. An attention group's table covers positions in order; a window
group gives up the blocks that no query will see again. A state group's table has one entry: the
block that holds the state behind the latest planned token.
"""

from __future__ import annotations

import enum

import attrs
import numpy as np

from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.scheduler.config import Role, SchedulerConfig

UNBOUNDED = 1 << 30


class Kind(enum.Enum):
    """The values of `CacheGroupSpec.kind`."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@attrs.frozen(kw_only=True)
class Group:
    """One cache group as the scheduler sees it.

    Attributes:
        stride: pages (blocks of the finest group) that one block covers.
        peak: blocks a prefill needs at once at most, beyond those it found; the chunks that may be in
            flight and what their queries see.
    """

    number: int
    kind: Kind
    block_tokens: int
    stride: int
    window: int
    peak: int
    zero: bool

    @property
    def by_position(self) -> bool:
        """Whether the table is indexed by position."""
        return self.kind is not Kind.STATE

    def blocks_for(self, tokens: int) -> int:
        """Length of a table that covers `tokens` tokens."""
        return -(-tokens // self.block_tokens) if self.by_position else min(tokens, 1)

    def first_seen(self, start: int) -> int:
        """Table index of the first block that a forward from position `start` on reads."""
        if self.kind is not Kind.WINDOW:
            return 0
        return max(0, start - self.window + 1) // self.block_tokens

    def first_seen_each(self, starts: Int32Array) -> Int32Array:
        """`first_seen` of a window group for int32 ``[n]``."""
        seen: Int32Array = np.maximum(starts - (self.window - 1), 0) // self.block_tokens
        return seen

    def new_blocks(self, *, cover: int, found: int) -> int:
        """Blocks to be promised to a prefill whose table will cover index `cover`, and has `found` of that."""
        return min(cover - found, self.peak)


def groups_of(
    specs: tuple[CacheGroupSpec, ...], *, page_tokens: int, chunk_tokens: int, ahead_tokens: int, flights: int
) -> tuple[Group, ...]:
    """The groups of a model.

    Args:
        ahead_tokens: room a request owns beyond what is planned.
        flights: chunks of one prompt that may be in flight at once.
    Raises: SettingsError: a group whose blocks do not fit the page, or of an unknown kind.
    """
    return tuple(
        _group(number, spec, page_tokens=page_tokens, ahead=ahead_tokens + flights * chunk_tokens)
        for number, spec in enumerate(specs)
    )


def _group(number: int, spec: CacheGroupSpec, *, page_tokens: int, ahead: int) -> Group:
    name = f"scheduler: cache group {spec.name!r}"
    kinds = {kind.value: kind for kind in Kind}
    kind = kinds.get(spec.kind)
    if kind is None:
        raise SettingsError(f"{name}: kind is {spec.kind!r}, must be one of {', '.join(kinds)}")
    if spec.block_tokens < page_tokens or spec.block_tokens % page_tokens:
        raise SettingsError(
            f"{name}: block_tokens is {spec.block_tokens}, must be a multiple of the page's {page_tokens} tokens"
        )
    if (kind is Kind.WINDOW) != (spec.window_tokens > 0):
        raise SettingsError(f"{name}: window_tokens is {spec.window_tokens}, must be above 0 exactly for a window")
    if spec.blocks_per_parent < 1:
        raise SettingsError(f"{name}: blocks_per_parent is {spec.blocks_per_parent}, must be at least 1")
    peak = UNBOUNDED
    if kind is Kind.WINDOW:
        peak = -(-(spec.window_tokens - 1 + ahead) // spec.block_tokens) + 1
    return Group(
        number=number,
        kind=kind,
        block_tokens=spec.block_tokens,
        stride=spec.block_tokens // page_tokens,
        window=spec.window_tokens,
        peak=peak,
        zero=spec.zero_new_blocks,
    )


def _chunk_tokens(config: SchedulerConfig) -> int:
    """Tokens that come at once: from another node, a whole prompt."""
    if config.role is Role.DECODE:
        return config.max_model_len
    return min(config.chunk_tokens, config.max_batched_tokens)


def model_groups(config: SchedulerConfig) -> tuple[Group, ...]:
    """The cache groups of the configured model."""
    return groups_of(
        config.specs,
        page_tokens=config.page_tokens,
        chunk_tokens=_chunk_tokens(config),
        ahead_tokens=config.ahead_tokens,
        flights=1 + config.overlap_schedule_depth,
    )
