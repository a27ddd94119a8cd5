"""The scheduler's static configuration."""

from __future__ import annotations

import enum

import attrs

from tokenspeed.errors import SettingsError
from tokenspeed.plane.specs import CacheGroupSpec


class Role(enum.Enum):
    """PLAIN computes prompts and outputs; PREFILL hands each prompt's KV to another node, DECODE gets it from one."""

    PLAIN = "plain"
    PREFILL = "prefill"
    DECODE = "decode"


class WritePolicy(enum.Enum):
    """When the host tier is written: WRITE_THROUGH as blocks become findable, WRITE_BACK as they are evicted."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


class Retraction(enum.Enum):
    """What may happen to a victim when pages run out; a chain of these is tried in order.

    SNAPSHOT keeps an image of the victim on the host; where there is no room for it, the chain goes on.
    RECOMPUTE sends the victim back to the waiting queue with its tokens. ABORT ends the newest resident.
    """

    SNAPSHOT = "snapshot"
    RECOMPUTE = "recompute"
    ABORT = "abort"


STORAGE_WAIT_S = 60.0
"""Unless somebody says otherwise, a request goes on without storage after this long."""


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Limits and choices of one scheduler; equal on all mirrors of a replica.

    Attributes:
        max_num_seqs: requests of one forward.
        spare_slots: request slots of the device beyond that: with overlap a request is seated while the last
            result of the one before it is still under way.
        max_batched_tokens: tokens of one forward. Fewer than `max_num_seqs` means fewer requests in it, so
            that each can have a token in every forward.
        chunk_tokens: prompt tokens of one request in one forward.
        page_tokens: tokens a block of the finest cache group holds: the granularity of prefixes.
        groups: the model's cache groups; empty: one of full attention with a block a parent.
        num_pages: parents of the pool, the reserved null parent 0 included.
        max_model_len: tokens (prompt and output) of one request.
        overlap_schedule_depth: forwards that may run ahead of their commit; a decode owns KV room for
            that many forwards' tokens beyond the planned one (SP-59).
        speculation_width: tokens a decode may commit in one forward.
        role: see `Role`.
        host_parents: parents of the host tier, its null parent included; 0: none.
        images: retraction images the device has room for.
        write_policy: of the host tier.
        storage: prompts are looked up in a storage backend before they are admitted.
        storage_min_tokens: of a prompt's cacheable part; shorter ones are not looked up.
        storage_wait_s: a request goes on without storage after this long, from its QUERY on (B-20).
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
    spare_slots: int = 0
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
    groups: tuple[CacheGroupSpec, ...] = ()
    speculation_width: int = 1
    role: Role = Role.PLAIN
    host_parents: int = 0
    images: int = 0
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    storage: bool = False
    storage_min_tokens: int = 0
    storage_wait_s: float = STORAGE_WAIT_S

    def __attrs_post_init__(self) -> None:
        least = {
            "max_num_seqs": 1,
            "spare_slots": 0,
            "max_batched_tokens": 1,
            "chunk_tokens": 1,
            "page_tokens": self.ahead_tokens + 1,
            "speculation_width": 1,
            "host_parents": 0,
            "images": 0,
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
    def request_slots(self) -> int:
        return self.max_num_seqs + self.spare_slots

    @property
    def seats(self) -> int:
        """Requests that may be in one forward."""
        return min(self.max_num_seqs, self.max_batched_tokens)

    @property
    def specs(self) -> tuple[CacheGroupSpec, ...]:
        return self.groups or (CacheGroupSpec(block_tokens=self.page_tokens),)

    @property
    def ahead_tokens(self) -> int:
        """Tokens a decode owns room for beyond the first of a forward (SP-59); 0 in the prefill role (SP-60)."""
        if self.role is Role.PREFILL:
            return 0
        return (1 + self.overlap_schedule_depth) * self.speculation_width - 1

    @property
    def early_tokens(self) -> int:
        """A decode may take its next block this many rounds, less one, before it needs it."""
        return max(1, self.page_tokens // 4)

    def blocks_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)
