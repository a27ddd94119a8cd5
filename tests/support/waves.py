"""Waves of greedy requests at random rounds, and counters that show what befell them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs

from tokenspeed.compose.engine import RankEngine
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.testing import RecordingLink


@attrs.define
class Counters:
    """What shows that a run did what its name says."""

    preempted: dict[str, int] = attrs.field(factory=dict)
    suspended: int = 0
    cached_tokens: int = 0
    overlapped: int = 0


def drive_waves(
    engine: RankEngine, link: RecordingLink, waves: Sequence[Mapping[str, list[int]]], *, new_tokens: int, seed: int
) -> Counters:
    """Send each wave's prompts at random rounds, a wave once all requests of the one before have ended."""
    rng, counters = random.Random(seed), Counters()
    loop, table = engine.loop, engine.loop.table
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    to_come = [list(wave.items()) for wave in waves]
    waiting = to_come.pop(0)
    while waiting or to_come or table.live:
        if not waiting and not table.live:
            waiting = to_come.pop(0)
        while waiting and rng.random() < 0.9:
            rid, ids = waiting.pop(0)
            link.put(GenerateRequest(rid=rid, input_ids=frozen_tokens(ids), sampling=sampling))
        loop.round()
        counters.overlapped += len(loop.state.in_flight)
        counters.suspended = max(counters.suspended, loop.scheduler.sizes().suspended)
        counters.preempted |= {rid: int(table.stats.preemptions[row]) for rid, row in table.by_rid.items()}
    counters.cached_tokens = max((cached for sent in link.sent for cached in sent.cached_tokens), default=0)
    return counters
