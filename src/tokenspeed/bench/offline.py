"""Measurements of an engine in this process: no HTTP, no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from tokenspeed.bench.data import Job
from tokenspeed.bench.report import Spread, spread_ms

if TYPE_CHECKING:  # a load on a foreign server is measured without torch
    from tokenspeed.compose.offline import Completion
    from tokenspeed.compose.offline_inputs import Prompt
    from tokenspeed.frontend.options import SamplingOptions


class Generates(Protocol):
    """What is measured, see `tokenspeed.Engine`."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Sequence[Completion]: ...


@attrs.frozen(kw_only=True)
class Throughput:
    """All jobs handed over at once; seconds until the last one ended."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.duration_s

    def as_dict(self) -> dict[str, Any]:
        return {
            **attrs.asdict(self),
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
        }


@attrs.frozen(kw_only=True)
class Latency:
    """The same batch again and again; the time of one whole batch."""

    batch: int
    runs: int
    batch_ms: Spread

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


def throughput(engine: Generates, jobs: Sequence[Job], sampling: Callable[[int], SamplingOptions]) -> Throughput:
    """Args:
    jobs: token ids, all with the same number of output tokens.
    sampling: from a number of output tokens to the engine's sampling options.
    """
    began_s = time.perf_counter()
    done = engine.generate([job.prompt for job in jobs], sampling(jobs[0].output_tokens))
    duration_s = time.perf_counter() - began_s
    return Throughput(
        requests=len(jobs),
        prompt_tokens=sum(len(completion.prompt_token_ids) for completion in done),
        output_tokens=sum(len(completion.token_ids) for completion in done),
        duration_s=duration_s,
    )


def latency(
    engine: Generates,
    batches: Sequence[Sequence[Job]],
    sampling: Callable[[int], SamplingOptions],
    *,
    on_done: Callable[[int], None] = lambda _: None,
) -> Latency:
    """`batches`: one a run, alike in shape but not in content, so that no run finds another's prefix."""
    times: list[float] = []
    for batch in batches:
        times.append(throughput(engine, batch, sampling).duration_s)
        on_done(len(times))
    return Latency(batch=len(batches[0]), runs=len(batches), batch_ms=spread_ms(times))
