"""What the device side decided at startup: numbers and names, nothing that can act (DP-27)."""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import SamplingParams


@attrs.frozen(kw_only=True)
class CacheGroupSpec:
    """One kind of per-token state the model keeps.

    Blocks of a group are numbered through the pool: those of parent p are
    ``p * blocks_per_parent + [0, blocks_per_parent)``. A parent holds blocks of one group at a time.

    Attributes:
        kind: ``full``: keys and values of every token; ``window``: of the last `window_tokens`;
            ``state``: a block is the whole state behind some position, written over by every forward.
        block_tokens: tokens one block of an attention group holds; a state group keeps snapshots of
            prompts at multiples of it, and where a prompt ends. A multiple of the finest group's.
        bytes_per_block: over all layers of the group, padding included.
        window_tokens: 0 unless kind is ``window``; a query sees itself and ``window_tokens - 1`` before it.
        blocks_per_parent: so many blocks fill a parent.
        zero_new_blocks: a new owner needs the block clean (SP-39).
        image_blocks: blocks that a retraction image has room for beside those in the host tier.
    """

    name: str = "full"
    kind: str = "full"
    block_tokens: int = 16
    layers: int = 1
    bytes_per_block: int = 0
    window_tokens: int = 0
    blocks_per_parent: int = 1
    zero_new_blocks: bool = False
    image_blocks: int = 2


@attrs.frozen(kw_only=True)
class DeviceSpecs:
    """Geometry of the device side, for planning. Plain, frozen and picklable.

    Attributes:
        vocab_size: ids below this may enter a forward and be sampled.
        max_model_len: tokens (prompt and output) one request may have.
        num_pages: LCM parents of the KV pool, the reserved null parent (id 0) included.
        page_tokens: tokens of the finest group's block: the granularity of prefixes.
        groups: cache groups in the order of their numbers.
        host_parents: LCM parents of the host tier (L2), its null parent included; 0: no host tier.
        images: retraction images the snapshot pool has room for; 0: none.
        max_num_seqs: requests of one forward.
        spare_slots: requests that may hold state beside them: those whose last result is under way.
        max_batched_tokens: tokens of one forward.
        speculation_width: tokens a decode row may commit a forward; 1 without a drafter.
        token_history_lookback: how far back in committed tokens the model looks; -1: whole prefix,
            0: it keeps no token history (HS-6, HS-7).
        max_logprobs: alternatives a sampled row can return.
        logits_processors: names of those that requests may use.
    """

    backend: str
    executor: str = "streams"
    model_name: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    dtype: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_tokens: int
    groups: tuple[CacheGroupSpec, ...] = (CacheGroupSpec(),)
    host_parents: int = 0
    images: int = 0
    max_num_seqs: int
    spare_slots: int = 0
    max_batched_tokens: int
    speculation_width: int = 1
    token_history_lookback: int = 0
    max_logprobs: int = 20
    logits_processors: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingParams = attrs.field(factory=SamplingParams)
    weights_bytes: int = 0
    kv_pool_bytes: int = 0

    @property
    def request_slots(self) -> int:
        return self.max_num_seqs + self.spare_slots
