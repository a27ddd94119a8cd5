"""From outcomes to figures, and from figures to a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from tokenspeed.bench.client import Outcome

QUANTILES = (50, 90, 99)


@attrs.frozen(kw_only=True)
class Spread:
    """Of one measured quantity, in ms; zeros if nothing was measured."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@attrs.frozen(kw_only=True)
class Report:
    """The figures of one measurement.

    Attributes:
        ttft_ms: from sending a request to its first piece of text.
        itl_ms: between pieces of text.
        tpot_ms: a request's time after its first piece, divided by its further tokens.
        e2e_ms: from sending to the last byte.
        faults: message of each kind of failure and how often it came.
    """

    completed: int
    failed: int
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    faults: tuple[tuple[str, int], ...]

    @property
    def requests_per_s(self) -> float:
        return self.completed / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **attrs.asdict(self),
            "faults": dict(self.faults),
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
        }


def report_of(outcomes: Sequence[Outcome]) -> Report:
    """Failed requests count as failed and are in no other figure."""
    good = [outcome for outcome in outcomes if not outcome.fault]
    started = min((outcome.sent_s for outcome in outcomes), default=0.0)
    ended = max((outcome.sent_s + outcome.total_s for outcome in good), default=started)
    with_text = [outcome for outcome in good if outcome.token_s]
    return Report(
        completed=len(good),
        failed=len(outcomes) - len(good),
        duration_s=ended - started,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=sum(outcome.output_tokens for outcome in good),
        ttft_ms=spread_ms(outcome.token_s[0] for outcome in with_text),
        itl_ms=spread_ms(
            later - earlier
            for outcome in with_text
            for earlier, later in zip(outcome.token_s, outcome.token_s[1:], strict=False)
        ),
        tpot_ms=spread_ms(
            (outcome.total_s - outcome.token_s[0]) / (outcome.output_tokens - 1)
            for outcome in with_text
            if outcome.output_tokens > 1
        ),
        e2e_ms=spread_ms(outcome.total_s for outcome in good),
        faults=tuple(Counter(outcome.fault for outcome in outcomes if outcome.fault).most_common()),
    )


def spread_ms(seconds: Iterable[float]) -> Spread:
    values = np.fromiter(seconds, dtype=np.float64) * 1e3
    if not len(values):
        return Spread()
    p50, p90, p99 = (float(value) for value in np.percentile(values, QUANTILES))
    return Spread(mean=float(values.mean()), p50=p50, p90=p90, p99=p99, max=float(values.max()))


def table_of(report: Report) -> str:
    """For people."""
    lines = [
        f"requests        {report.completed} answered, {report.failed} failed, in {report.duration_s:.2f} s",
        f"requests/s      {report.requests_per_s:.2f}",
        f"tokens/s        {report.output_tokens_per_s:.1f} out, {report.total_tokens_per_s:.1f} in and out",
        f"tokens          {report.prompt_tokens} in ({report.cached_tokens} cached), {report.output_tokens} out",
    ]
    if report.completed:  # else there is no time to show, and zeros would look like one
        lines += ["", *_times(report)]
    lines += [f"failed {count} times: {fault}" for fault, count in report.faults]
    return "\n".join(lines)


def _times(report: Report) -> list[str]:
    lines = [f"{'ms':<26}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"]
    for label, spread in (
        ("time to first token", report.ttft_ms),
        ("between pieces", report.itl_ms),
        ("per output token", report.tpot_ms),
        ("whole request", report.e2e_ms),
    ):
        figures = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        lines.append(f"{label:<26}" + "".join(f"{figure:>10.2f}" for figure in figures))
    return lines
