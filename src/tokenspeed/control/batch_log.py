"""The operator's periodic line about rounds; silent when idle (PT-28)."""

from __future__ import annotations

import logging

import attrs

from tokenspeed.plane.messages import LoadReport

log = logging.getLogger("tokenspeed.batch")
PAUSE_S = 2.0
"""Between two forwards, this is idleness: rates are of the time in which the engine worked."""


@attrs.define(eq=False)
class BatchTotals:
    """Writer: BatchLog. Sums since the last line; `busy_s` leaves out the pauses in which nothing ran."""

    last_s: float | None = None
    busy_s: float = 0.0
    rounds: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0


@attrs.frozen(kw_only=True, eq=False)
class BatchLog:
    """A line whenever forwards have run for `interval_s`, pauses not counted."""

    interval_s: float = 10.0
    totals: BatchTotals = attrs.field(factory=BatchTotals)

    def record(self, load: LoadReport, *, decode_tokens: int, prompt_tokens: int, preempted: int, now_s: float) -> None:
        """Note one round's forward, on the snapshot taken before dispatch (KM-4)."""
        totals = self.totals
        if totals.last_s is not None and now_s - totals.last_s < PAUSE_S:
            totals.busy_s += now_s - totals.last_s
        totals.last_s = now_s
        totals.rounds += 1
        totals.decode_tokens += decode_tokens
        totals.prompt_tokens += prompt_tokens
        totals.preempted += preempted
        if totals.busy_s < self.interval_s:
            return
        fields = {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": round(load.active_blocks / max(1, load.total_blocks), 4),
            "rounds": totals.rounds,
            "prompt_tokens_per_s": round(totals.prompt_tokens / totals.busy_s, 1),
            "decode_tokens_per_s": round(totals.decode_tokens / totals.busy_s, 1),
            "preempted": totals.preempted,
        }
        log.info(
            "running %d, waiting %d, KV %.1f%%, %d rounds, %.1f prompt tok/s, %.1f decode tok/s, preempted %d",
            load.running,
            load.waiting,
            100 * fields["kv_usage"],
            totals.rounds,
            fields["prompt_tokens_per_s"],
            fields["decode_tokens_per_s"],
            totals.preempted,
            extra={"fields": fields},
        )
        totals.rounds = totals.prompt_tokens = totals.decode_tokens = totals.preempted = 0
        totals.busy_s = 0.0
