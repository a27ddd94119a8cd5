"""The CPU as an asynchronous device: three host streams over ordinary memory.

Only jobs of the exec stream may call into torch's parallel kernels: a second OpenMP team in the
process halves a barrier-bound step. The write and load streams copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext

import attrs
import numpy as np
import torch

from tokenspeed.device.backends.base import HostArray
from tokenspeed.device.backends.host_stream import HostEvent, HostStream, JobScope, JobWatch, open_host_stream
from tokenspeed.device.host_sync import device_code, host_to_device
from tokenspeed.errors import InvariantBroken

HOST = torch.device("cpu")
CLOSE_S = 30.0
LEAST_S = 0.5
"""For a stream to end whose turn comes when another has taken all the time."""


@attrs.frozen(kw_only=True, eq=False)
class HostBuffer:
    """Memory that only jobs may look into, although nothing but this check keeps others out."""

    tensor: torch.Tensor = attrs.field(repr=False)
    scope: JobScope

    def unwrap(self, rows: Iterable[int] | None = None) -> torch.Tensor:
        del rows
        self.scope.current()
        return self.tensor


@attrs.frozen(kw_only=True, eq=False)
class LandedArray:
    """A copy that became readable when `event` did."""

    values: HostArray = attrs.field(repr=False)
    event: HostEvent

    def array(self) -> HostArray:
        if not self.event.query():
            raise InvariantBroken("a host copy read before its event")
        return self.values


@attrs.frozen(kw_only=True, eq=False)
class CpuBackend:
    """A `Backend` on the host's own cores and memory. Open it with `open_cpu_backend`.

    Attributes:
        close_s: what all streams together get to end.
    """

    scope: JobScope
    exec_stream: HostStream
    write_stream: HostStream
    load_stream: HostStream
    close_s: float = CLOSE_S
    name: str = "cpu"

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        self.scope.current()
        return HostBuffer(tensor=torch.zeros(shape, dtype=dtype), scope=self.scope)

    def to_device(self, array: HostArray) -> torch.Tensor:
        self.scope.current()
        return host_to_device(array, HOST)

    @device_code
    def to_host(self, tensor: torch.Tensor) -> LandedArray:
        values: HostArray = np.array(tensor.detach().numpy())
        return LandedArray(values=values, event=self.scope.current())

    def close(self) -> None:
        """A stream that does not end is named, with its job, before the forward thread's own time is up."""
        streams, until_s = (self.exec_stream, self.write_stream, self.load_stream), time.monotonic() + self.close_s
        for stream in streams:
            stream.release()  # streams wait for each other: all must run for one to end
        with ExitStack() as closing:
            for stream in streams:
                closing.callback(_close, stream, until_s)


def _close(stream: HostStream, until_s: float) -> None:
    stream.close(max(LEAST_S, until_s - time.monotonic()))


def open_cpu_backend(threads: int, watch: JobWatch = nullcontext) -> CpuBackend:
    """Start the streams; the exec stream computes with `threads` threads.

    Args:
        watch: what jobs of the exec stream run inside of. The other two are not watched: they are
            themselves the copies between device and host.

    torch keeps the number for threads of the process that have not computed yet, too.
    """
    scope = JobScope()
    with ExitStack() as opened:
        streams = []
        for name in ("exec", "write", "load"):
            stream = open_host_stream(name, scope, watch=watch if name == "exec" else nullcontext)
            opened.callback(stream.close)
            streams.append(stream)
        streams[0].submit(lambda: torch.set_num_threads(threads), "threads").wait()
        opened.pop_all()
    return CpuBackend(scope=scope, exec_stream=streams[0], write_stream=streams[1], load_stream=streams[2])
