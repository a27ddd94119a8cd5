"""The scheduler's static configuration."""

from __future__ import annotations

import enum

import attrs

from tokenspeed.errors import SettingsError


class Retraction(enum.Enum):
    """What may happen to a victim when pages run out; a chain of these is tried in order.

    SNAPSHOT needs an image pool on the host; without one no victim can be imaged and the chain goes on.
    RECOMPUTE sends the victim back to the waiting queue with its tokens. ABORT ends the newest resident.
    """

    SNAPSHOT = "snapshot"
    RECOMPUTE = "recompute"
    ABORT = "abort"


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Limits and choices of one scheduler; equal on all mirrors of a replica.

    Attributes:
        max_num_seqs: request slots of the device.
        max_batched_tokens: tokens of one forward. Fewer than `max_num_seqs` means fewer residents, so
            that each can have a token in every forward.
        chunk_tokens: prompt tokens of one request in one forward.
        page_tokens: tokens one block holds.
        num_pages: blocks of the pool, the reserved null block 0 included.
        max_model_len: tokens (prompt and output) of one request.
        overlap_schedule_depth: forwards that may run ahead of their commit; a decode owns KV room for
            that many tokens beyond the planned one (SP-59).
        prefix: find and keep computed prefixes.
        kv_events: collect cache changes for `drain_kv_events`.
        retraction: tried in order for a victim of memory pressure.
        resume_headroom_tokens: a retracted request returns only when this much room beyond its own
            tokens is left, so that it is not retracted again at once (B-21: two requests that evict
            each other for ever).
        zero_new_blocks: list granted blocks in `pages_to_zero`. Not needed by full attention, where a
            forward reads positions below its context only and each was written before; for models
            or kernels that read whole pages.
    """

    max_num_seqs: int
    max_batched_tokens: int
    chunk_tokens: int
    page_tokens: int
    num_pages: int
    max_model_len: int
    overlap_schedule_depth: int = 0
    prefix: bool = True
    kv_events: bool = True
    retraction: tuple[Retraction, ...] = (Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT)
    resume_headroom_tokens: int = 64
    zero_new_blocks: bool = False

    def __attrs_post_init__(self) -> None:
        least = {
            "max_num_seqs": 1,
            "max_batched_tokens": 1,
            "chunk_tokens": 1,
            "page_tokens": self.overlap_schedule_depth + 1,
            "num_pages": 2,
            "max_model_len": 2,
            "overlap_schedule_depth": 0,
            "resume_headroom_tokens": 0,
        }
        faults = [
            f"scheduler: {name} is {getattr(self, name)}, must be at least {floor}"
            for name, floor in least.items()
            if getattr(self, name) < floor
        ]
        if not {Retraction.RECOMPUTE, Retraction.ABORT} & set(self.retraction):
            shown = [step.value for step in self.retraction]
            faults.append(f"scheduler: retraction is {shown}, must contain recompute or abort: images need a pool")
        if faults:
            raise SettingsError("\n".join(faults))

    @property
    def seats(self) -> int:
        """Requests that may be resident at once."""
        return min(self.max_num_seqs, self.max_batched_tokens)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)
