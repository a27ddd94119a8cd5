"""What one step leaves for the next: its future, whose it is, and the output to materialise in a break."""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.device.executors.futures.output import AsyncModelRunnerOutput
from tokenspeed.device.executors.futures.runtime import DeviceFuture


class ExecutionBuffer(Protocol):
    """``async_execution_buffer``; ``ts-forward`` only. Holding the future here keeps it alive over the step."""

    @property
    def futures_sampled_token_ids(self) -> DeviceFuture | None:
        """int64 ``[num_reqs]``, padded in steady state; None before the first step."""
        ...

    @property
    def prev_req_ids_ordered(self) -> tuple[str, ...] | None:
        """The requests in the order that produced the future."""
        ...

    @property
    def async_output(self) -> AsyncModelRunnerOutput | None:
        """Read only to break the flow."""
        ...

    def store(self, future: DeviceFuture, req_ids: tuple[str, ...], output: AsyncModelRunnerOutput) -> None: ...

    def clear(self) -> None: ...


@attrs.define(eq=False)
class LastStep:
    """`ExecutionBuffer` of one step. Writer: ModelRunner."""

    futures_sampled_token_ids: DeviceFuture | None = None
    prev_req_ids_ordered: tuple[str, ...] | None = None
    async_output: AsyncModelRunnerOutput | None = None

    def store(self, future: DeviceFuture, req_ids: tuple[str, ...], output: AsyncModelRunnerOutput) -> None:
        self.futures_sampled_token_ids, self.prev_req_ids_ordered, self.async_output = future, req_ids, output

    def clear(self) -> None:
        self.futures_sampled_token_ids = self.prev_req_ids_ordered = self.async_output = None
