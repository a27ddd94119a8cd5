"""The operator's periodic line about rounds; silent when idle (PT-28)."""

from __future__ import annotations

import logging

import attrs

from tokenspeed.plane.messages import LoadReport

log = logging.getLogger("tokenspeed.batch")


@attrs.define(eq=False)
class BatchTotals:
    """Writer: BatchLog. Sums since the last line."""

    since_s: float = 0.0
    rounds: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0


@attrs.frozen(kw_only=True, eq=False)
class BatchLog:
    interval_s: float = 10.0
    totals: BatchTotals = attrs.field(factory=BatchTotals)

    def record(self, load: LoadReport, *, decode_tokens: int, prompt_tokens: int, preempted: int, now_s: float) -> None:
        """Note one round's forward, on the snapshot taken before dispatch (KM-4)."""
        totals = self.totals
        if not totals.rounds:
            totals.since_s = now_s
        totals.rounds += 1
        totals.decode_tokens += decode_tokens
        totals.prompt_tokens += prompt_tokens
        totals.preempted += preempted
        span = now_s - totals.since_s
        if span < self.interval_s:
            return
        usage = load.active_blocks / max(1, load.total_blocks)
        log.info(
            "running %d, waiting %d, KV %.1f%%, %d rounds, %.1f prompt tok/s, %.1f decode tok/s, preempted %d",
            load.running,
            load.waiting,
            100 * usage,
            totals.rounds,
            totals.prompt_tokens / span,
            totals.decode_tokens / span,
            totals.preempted,
        )
        totals.rounds = totals.prompt_tokens = totals.decode_tokens = totals.preempted = 0
