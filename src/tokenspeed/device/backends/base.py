"""The protocol every device meets.

A *stream* runs jobs one after another, in the order they were submitted. An *event* stands for the
end of one job. Streams are ordered among each other only by `DeviceStream.wait`. Which thread runs
a job is the backend's business: a CPU stream has a thread of its own, a stream of a graphics device
launches kernels on the submitting thread. A job therefore never waits for its stream, and reads
tensors back only through `Backend.to_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.plane.ports import Wakeup

Job: TypeAlias = Callable[[], None]
HostArray: TypeAlias = npt.NDArray[np.generic]


class DeviceEvent(Protocol):
    """The end of one submitted job. Every method is safe from any thread."""

    def query(self) -> bool:
        """Whether the job has ended, well or not; never waits."""
        ...

    def wait(self) -> None:
        """Block the calling host thread until then, without the GIL.

        Raises: what this job, or an earlier one that its stream depends on, raised.
        """
        ...

    def notify(self, wakeup: Wakeup) -> None:
        """Have `wakeup` set when the job ends; at once if it has."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds the device spent on the job; 0.0 until it has ended."""
        ...


class DeviceStream(Protocol):
    """Runs jobs first in, first out. `submit` and `wait` return at once unless the queue is full."""

    @property
    def name(self) -> str: ...

    def submit(self, job: Job, label: str) -> DeviceEvent:
        """Queue `job`; `label` names it in logs and tests. Not to be called from a job.

        Once a job has raised, later jobs are skipped and their events carry its exception.
        """
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Let jobs submitted from here on start only after `event`; the host does not wait."""
        ...


class DeviceBuffer(Protocol):
    """Device memory, opaque to the host side."""

    def unwrap(self, rows: Iterable[int] | None = None) -> torch.Tensor:
        """The whole tensor, of which the running job touches `rows`, None: all.

        Raises InvariantBroken: outside a job of a stream of this backend; and, where `device.stream_order` checks it,
        of jobs that touch the same rows and that no wait orders.
        """
        ...


class HostCopy(Protocol):
    """A copy of a tensor on its way to the host."""

    def array(self) -> HostArray:
        """The values. Raises InvariantBroken while the job that made the copy has not ended."""
        ...


class Backend(Protocol):
    """One opened device. `allocate`, `to_device` and `to_host` are called inside a job."""

    @property
    def name(self) -> str: ...

    @property
    def exec_stream(self) -> DeviceStream:
        """Runs forwards, and everything else that computes."""
        ...

    @property
    def write_stream(self) -> DeviceStream:
        """Copies device blocks to the host tier."""
        ...

    @property
    def load_stream(self) -> DeviceStream:
        """Copies host-tier blocks to the device."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceBuffer:
        """Zeroed memory."""
        ...

    def to_device(self, array: HostArray) -> torch.Tensor:
        """Hand `array` to the device without blocking; nobody may write it afterwards."""
        ...

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Begin a copy that later writes to `tensor` do not change; readable once this job ended."""
        ...

    def close(self) -> None:
        """Run what is queued, then join the streams. Raises DeviceLost: a stream does not end."""
        ...
