"""What is used of torch's CUDA streams, events and graphs, as a seam: all calls into the driver go through here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, cast

import attrs
import torch

from tokenspeed.device.backends.base import HostArray
from tokenspeed.device.host_sync import host_to_device


class CudaEventLike(Protocol):
    """`torch.cuda.Event`, as far as it is used."""

    def record(self, stream: CudaStreamLike) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Block without the interpreter's lock, and without spinning."""
        ...

    def elapsed_time(self, end: CudaEventLike) -> float:
        """Milliseconds from this event to `end`; both have ended."""
        ...


class CudaStreamLike(Protocol):
    """`torch.cuda.Stream`, as far as it is used."""

    def wait_event(self, event: CudaEventLike) -> None: ...

    def synchronize(self) -> None: ...


class CudaApi(Protocol):
    """One device. Safe from any thread."""

    @property
    def device(self) -> torch.device: ...

    def stream(self) -> CudaStreamLike:
        """A new one, which does not wait for the default stream."""
        ...

    def current_stream(self) -> CudaStreamLike:
        """Of the calling thread."""
        ...

    def event(self) -> CudaEventLike:
        """A new one that keeps its time and whose waiters sleep."""
        ...

    def on(self, stream: CudaStreamLike) -> AbstractContextManager[object]:
        """Launch on `stream` what the calling thread launches."""
        ...

    def to_device(self, array: HostArray) -> torch.Tensor:
        """On its way without a wait, out of pinned memory."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies to without a wait."""
        ...

    def pin(self, array: HostArray) -> None:
        """Pin memory that is there already, until `unpin`. Raises MemoryError: the driver refuses."""
        ...

    def unpin(self) -> None:
        """Let go of all that was pinned; a second call does nothing."""
        ...


@attrs.define(eq=False)
class PinnedMemory:
    """Writer: TorchCuda. The arrays are kept: what is pinned must not be freed."""

    arrays: list[HostArray] = attrs.field(factory=list[HostArray])


@attrs.frozen(kw_only=True, eq=False)
class TorchCuda:
    """`CudaApi` by torch."""

    device: torch.device
    memory: PinnedMemory = attrs.field(factory=PinnedMemory)

    def stream(self) -> CudaStreamLike:
        made = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it so
        return cast("CudaStreamLike", made)

    def current_stream(self) -> CudaStreamLike:
        return cast("CudaStreamLike", torch.cuda.current_stream(self.device))

    def event(self) -> CudaEventLike:
        made = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it so
        return cast("CudaEventLike", made)

    def on(self, stream: CudaStreamLike) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast("torch.cuda.Stream", stream))

    def to_device(self, array: HostArray) -> torch.Tensor:
        return host_to_device(array, self.device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, array: HostArray) -> None:
        if not array.nbytes:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
        if int(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, 0)):
            raise MemoryError(f"the driver does not pin {array.nbytes:,} bytes")
        self.memory.arrays.append(array)

    def unpin(self) -> None:
        if self.memory.arrays:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
            while self.memory.arrays:
                runtime.cudaHostUnregister(self.memory.arrays.pop().ctypes.data)
