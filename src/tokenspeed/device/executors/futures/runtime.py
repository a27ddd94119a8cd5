"""Device futures: a job takes unresolved outputs of earlier jobs and begins once they are resolved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch

from tokenspeed.device.backends.base import Backend, DeviceEvent, HostArray, HostCopy, Job
from tokenspeed.errors import InvariantBroken


@attrs.define(eq=False)
class FutureCell:
    """Writer: the job that makes the output, before its event."""

    made: torch.Tensor | None = None
    copy: HostCopy | None = None


class FuturesLog(Protocol):
    """Is told what the executor does, by the thread that does it; for figures and tests."""

    def stage(self, name: str, detail: str) -> None:
        """A step of the flow was entered: ``update_states``, ``get_output``, …"""
        ...

    def launched(self, label: str, inputs: tuple[DeviceFuture, ...], output: DeviceFuture) -> None: ...

    def moved(self, what: str, *, blocking: bool) -> None:
        """Host memory goes to the device."""
        ...

    def touched(self, future: DeviceFuture, why: str) -> None:
        """The calling thread is about to wait for `future`."""
        ...


@attrs.frozen(eq=False)
class NoLog:
    def stage(self, name: str, detail: str) -> None:
        return None

    def launched(self, label: str, inputs: tuple[DeviceFuture, ...], output: DeviceFuture) -> None:
        return None

    def moved(self, what: str, *, blocking: bool) -> None:
        return None

    def touched(self, future: DeviceFuture, why: str) -> None:
        return None


@attrs.frozen(kw_only=True, eq=False)
class DeviceFuture:
    """A tensor that a queued job will have made. Its shape and dtype are known before."""

    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    event: DeviceEvent
    cell: FutureCell
    log: FuturesLog

    def resolved(self) -> bool:
        """Looks, never waits; safe from any thread."""
        return self.event.query()

    def wait(self, why: str) -> None:
        """Block the calling thread until the job has ended. Raises what the device raised."""
        self.log.touched(self, why)
        self.event.wait()

    def to_host(self, why: str) -> HostArray:
        """Wait, then the values. The copy was made by the job: nothing written later changes it."""
        self.wait(why)
        if self.cell.copy is None:
            raise InvariantBroken("a future that was not made to be read by the host", label=self.label)
        return self.cell.copy.array()

    def unwrap(self) -> torch.Tensor:
        """The tensor; only inside a job that was launched with this future among its inputs."""
        if self.cell.made is None:
            raise InvariantBroken("a future used before its job ran", label=self.label)
        return self.cell.made


@attrs.frozen(kw_only=True, eq=False)
class FuturesRuntime:
    """One in-order queue of jobs over a backend; ``ts-forward`` launches. No stream leaves it."""

    backend: Backend
    log: FuturesLog = attrs.field(factory=NoLog)

    def launch(
        self,
        job: Callable[[], torch.Tensor],
        *,
        inputs: tuple[DeviceFuture, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        label: str,
        to_host: bool = False,
    ) -> DeviceFuture:
        """Queue `job`, to begin once `inputs` are resolved, and return its output at once.

        Args:
            shape: of the output; the job is held to it.
            to_host: the job copies its output out, so that `DeviceFuture.to_host` can be called.
        """
        cell, stream = FutureCell(), self.backend.exec_stream

        def run() -> None:
            made = job()
            if tuple(made.shape) != shape or made.dtype != dtype:
                raise InvariantBroken("an output of another kind than announced", label=label, shape=made.shape)
            cell.made = made
            if to_host:
                cell.copy = self.backend.to_host(made)

        for future in inputs:
            if not future.resolved():
                stream.wait(future.event)
        event = self.queue(run, label)
        future = DeviceFuture(label=label, shape=shape, dtype=dtype, event=event, cell=cell, log=self.log)
        self.log.launched(label, inputs, future)
        return future

    def queue(self, job: Job, label: str) -> DeviceEvent:
        """Queue work without an output."""

        def without_gradients() -> None:
            with torch.inference_mode():
                job()

        return self.backend.exec_stream.submit(without_gradients, label)
