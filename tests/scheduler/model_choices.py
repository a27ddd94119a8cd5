"""What a random life can be made of: configurations, and the arguments of each action, as values to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import attrs
from scheduler_rig import config
from toy_groups import some_groups

from tokenspeed.plane.plan import LoadBackOp, RestoreOp, SnapshotOp, WriteBackOp
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import MediaItem
from tokenspeed.scheduler.config import Retraction, Role, SchedulerConfig, WritePolicy
from tokenspeed.scheduler.policy import AgedPriority, Fcfs, LongestPrefixMatch
from tokenspeed.scheduler.states import State

Choices: TypeAlias = Mapping[str, tuple[object, ...]]

STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5], [1] * 20)
IMAGES = (
    (),
    (MediaItem(first=0, tokens=3, digest=b"cat"),),
    (MediaItem(first=0, tokens=3, digest=b"dog"),),
    (MediaItem(first=5, tokens=4, digest=b"cat"),),
    (MediaItem(first=5, tokens=4, digest=b"dog"), MediaItem(first=11, tokens=2, digest=b"cat")),
)
AWKWARD = (
    State.YIELDING,
    State.IMAGING,
    State.SUSPENDED,
    State.RESTORING,
    State.PREPARING,
    State.PREFILL_DONE,
    State.HANDOFF,
    State.DRAINING,
)
"""States that few requests are in, or not for long."""

KINDS: tuple[type, ...] = (WriteBackOp, LoadBackOp, SnapshotOp, RestoreOp)
CHAINS = (
    (Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT),
    (Retraction.SNAPSHOT, Retraction.ABORT),
    (Retraction.ABORT,),
)

SETUP: Choices = MappingProxyType(
    {
        "depth": (0, 1),
        "page": (2, 3, 4, 5),
        "room": (36, 40, 46, 54),  # tokens that the pool has blocks for
        "seqs": (2, 3, 4, 5, 5),
        "budget": (3, 5, 8, 12, 16),
        "chunk": (1, 3, 5, 8, 8),
        "prefix": (True, True, True, True, False),
        "chain": (CHAINS[0], CHAINS[0], CHAINS[1], CHAINS[2]),
        "zero": (False, True),
        "policy": (0, 1, 2),
        "headroom": (0, 2, 5),
        "groups": ("full", "full", "full", *some_groups(4)),
        "host": (0, 3, 6, 15, 40, 40),
        "images": (0, 1, 2, 2),
        "write": tuple(WritePolicy),
        "storage": (True, False, False),
        "delay": (0, 0, 1, 2),
        "mirrored": (False, False, True),
    }
)

SUBMIT: Choices = MappingProxyType(
    {
        "stem": (0, 1, 2),
        "keep": (0, 2, 3, 5, 8, 9, 12, 16, 20),
        "tail": ((0,), (7,), (2, 2), (9, 4), (5, 0, 5), (8, 6, 4, 2)),
        "max_new": (1, 2, 8, 12, 16, 18, 18),
        "eos_ends": (True, False, False),
        "salt": (b"", b"", b"", b"salt"),
        "priority": (-2, 0, 2),
        "prompt_from": (-1, -1, -1, -1, 0, 3),
        "copies": (1, 2, 3),
        "media": (0, 0, 0, 0, 1, 2, 3, 4),
    }
)

ACTIONS: Mapping[str, tuple[int, Choices]] = MappingProxyType(
    {
        # name: weight in a seeded trace, arguments
        "submit": (36, SUBMIT),
        "abort": (6, {"which": tuple(range(30)), "rare": (True, True, False), "times": (1, 1, 2)}),
        "abort_when": (6, {"state": AWKWARD, "patience": (3, 8), "times": (1, 2)}),
        "rounds": (38, {"count": (1, 1, 2, 3, 5)}),
        "plan_ahead": (8, {}),
        "land_one": (4, {}),
        "clear": (1, {}),
        "lull": (1, {"clear": (True, True, False)}),
        "freeze": (3, {"frozen": (True, False, False)}),
        "withhold": (5, {"kind": (0, 1, 2, 3), "held": (True, False)}),
        "acknowledge_one": (6, {"which": tuple(range(6)), "times": (1, 2)}),
        "acknowledge_unknown": (2, {"number": (1, 2, 3, 7, 20, 10**6)}),
        "storage_serves": (3, {"served": (True, False)}),
        "storage_ends": (9, {"which": tuple(range(6)), "fails": (0, 0, 1, 2, 15), "cancel": (True, False)}),
        "storage_repeats": (2, {"which": tuple(range(12))}),
        "storage_lags": (2, {"seconds": (1.0, 1.0, 30.0, 61.0), "pressure": (0.0, 0.0, 0.5, 0.98, 1.0)}),
        "transfers_hang": (4, {"held": (True, False)}),
        "transfer_ends": (10, {"which": tuple(range(6)), "ok": (True, True, False)}),
    }
)


def policy_of(number: int) -> SchedulingPolicy:
    if number == 2:
        return LongestPrefixMatch(patience_rounds=30)
    return AgedPriority(rounds_per_level=2, patience_rounds=30) if number else Fcfs()


def _parents(spec: CacheGroupSpec, room: int, seqs: int) -> int:
    """For `room` tokens of `seqs` requests, more or less."""
    blocks = seqs + 2 if spec.kind == "state" else -(-room // spec.block_tokens)
    return -(-blocks // spec.blocks_per_parent)


def config_of(role: Role, chosen: Mapping[str, object]) -> SchedulerConfig:
    """A scheduler of that role as `SETUP` has it, with what does not go together left out."""
    page, prefix, host = int(str(chosen["page"])), bool(chosen["prefix"]), int(str(chosen["host"]))
    groups = some_groups(page)[str(chosen["groups"])]
    seqs, room = int(str(chosen["seqs"])), int(str(chosen["room"]))
    base = config(
        max_num_seqs=seqs,
        spare_slots=seqs * int(str(chosen["depth"])) if chosen["zero"] else 0,
        max_batched_tokens=chosen["budget"],
        chunk_tokens=chosen["chunk"],
        page_tokens=page,
        num_pages=1 + sum(_parents(spec, room, seqs) for spec in groups),
        max_model_len=40,
        overlap_schedule_depth=chosen["depth"],
        prefix=prefix,
        retraction=chosen["chain"],
        zero_new_blocks=chosen["zero"],
        resume_headroom_tokens=chosen["headroom"],
        groups=groups,
        host_parents=host,
        images=chosen["images"],
        write_policy=chosen["write"],
    )
    storage = bool(chosen["storage"]) and prefix and host >= 2 and role is not Role.DECODE
    return attrs.evolve(base, role=role, storage=storage)
