"""The scheduler as the round sees it, and the part of it that deployments replace; see `plane.ports`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tokenspeed.plane.plan import ExecutionPlan
from tokenspeed.plane.results import HeadFacts, KvEvent, SchedulerEvent, Sizes, SubmitResult


@runtime_checkable
class Scheduler(Protocol):
    """Plans rounds. Deterministic: no clock, no randomness, no threads (SP-1, SP-3).

    Requests are named by their row in the request table. Only the round calls the mutating methods
    (``submit, abort, next_execution_plan, advance_head, advance, clear_cache, drain_kv_events``).
    """

    def submit(self, rows: Sequence[int]) -> SubmitResult:
        """Take all of `rows` or none; the whole batch is validated first (IS-19..22)."""
        ...

    def holds(self, row: int) -> bool:
        """Whether the row is still the scheduler's: from submit until the plan after its end (SP-5)."""
        ...

    def abort(self, rows: Sequence[int]) -> None:
        """End these; unknown rows are ignored. Pages return once their forwards landed (SP-54)."""
        ...

    def next_execution_plan(self) -> ExecutionPlan:
        """Plan a round; admits, retracts, evicts and drops ended requests on the way."""
        ...

    def advance_head(self, facts: HeadFacts) -> None: ...

    def advance(self, events: Sequence[SchedulerEvent]) -> None: ...

    def sizes(self) -> Sizes: ...

    @property
    def num_usable_pages(self) -> int:
        """LCM parents without the null parent."""
        ...

    def empty_lcm_blocks(self) -> int:
        """Parents that hold nothing; O(1)."""
        ...

    def active_lcm_blocks(self) -> int:
        """Parents used by live requests; walks their tables."""
        ...

    def available_lcm_blocks(self) -> int:
        """Parents that could be granted (empty or cached only); diagnostics."""
        ...

    def can_clear_cache(self) -> bool: ...

    def clear_cache(self) -> bool:
        """Forget the prefix cache if no request holds pages; False: not now."""
        ...

    def drain_kv_events(self) -> tuple[KvEvent, ...]:
        """Net changes of the prefix cache since the last drain."""
        ...


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Orders the waiting queue: the part of a scheduler that deployments like to replace."""

    def key(
        self, *, order: int, priority: int, prompt_len: int, waited_rounds: int, cached_tokens: int
    ) -> tuple[float, ...]:
        """Smaller is admitted earlier. Must not depend on anything but its arguments.

        Args:
            order: admission number, rising.
            waited_rounds: plans built since the request began to wait.
            cached_tokens: of the prompt, found in the prefix cache when last looked; 0 unless
                `wants_cached_tokens`.
        """
        ...

    @property
    def wants_cached_tokens(self) -> bool:
        """Whether `key` looks at `cached_tokens`; it is not computed for policies that do not."""
        ...
