"""What the device side decided at startup: numbers and names, nothing that can act (DP-27)."""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import SamplingParams


@attrs.frozen(kw_only=True)
class CacheGroupSpec:
    """One kind of per-token state the model keeps.

    Attributes:
        kind: ``full`` attention; ``window`` and ``state`` come with hybrid models.
        block_tokens: tokens one block of this group holds.
        bytes_per_block: over all layers of the group.
        window_tokens: 0 unless kind is ``window``.
    """

    name: str = "full"
    kind: str = "full"
    block_tokens: int = 16
    layers: int = 1
    bytes_per_block: int = 0
    window_tokens: int = 0


@attrs.frozen(kw_only=True)
class DeviceSpecs:
    """Geometry of the device side, for planning. Plain, frozen and picklable.

    Attributes:
        vocab_size: ids below this may enter a forward and be sampled.
        max_model_len: tokens (prompt and output) one request may have.
        num_pages: LCM parents of the KV pool, the reserved null parent (id 0) included.
        page_tokens: tokens a parent holds.
        max_num_seqs: request slots.
        max_batched_tokens: tokens of one forward.
        speculation_width: tokens a decode row may commit a forward; 1 without a drafter.
        token_history_lookback: how far back in committed tokens the model looks; -1: whole prefix,
            0: it keeps no token history (HS-6, HS-7).
        max_logprobs: alternatives a sampled row can return.
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
    max_num_seqs: int
    max_batched_tokens: int
    speculation_width: int = 1
    token_history_lookback: int = 0
    max_logprobs: int = 20
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingParams = attrs.field(factory=SamplingParams)
    supports_prompt_logprobs: bool = True
    weights_bytes: int = 0
    kv_pool_bytes: int = 0
