"""How blocks are copied between the device's pool and host memory: by plain memory copies, or by the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch

from tokenspeed.device.executors.ports import HostBytes
from tokenspeed.device.kv.host_buffers import copy_blocks
from tokenspeed.device.layer_counter import LayersArrived


class BlockMover(Protocol):
    """Copies inside jobs of the write and load streams. `device` is a view of the pool, `host` of a host buffer.

    Both are uint8, blocks by their first index; the rest of their shapes is the same.
    """

    def to_host(self, host: HostBytes, to: tuple[int, ...], device: torch.Tensor, of: tuple[int, ...]) -> None:
        """``host[to[i]] = device[of[i]]`` for every i, in order."""
        ...

    def to_device(self, device: torch.Tensor, to: tuple[int, ...], host: HostBytes, of: tuple[int, ...]) -> None:
        """``device[to[i]] = host[of[i]]`` for every i, in order."""
        ...


class MemoryMover:
    """Where the pool is host memory."""

    def to_host(self, host: HostBytes, to: tuple[int, ...], device: torch.Tensor, of: tuple[int, ...]) -> None:
        copy_blocks(host, to, _array(device), of)

    def to_device(self, device: torch.Tensor, to: tuple[int, ...], host: HostBytes, of: tuple[int, ...]) -> None:
        copy_blocks(_array(device), to, host, of)


class DriverMover:
    """Where it is not: copies that do not wait, if the host's memory is pinned, on the current stream.

    Each block of a layer, or all layers of a block, is one run on both sides: one call of the driver.
    A copy of several, which are not one run where there is padding, would go through a buffer that is not pinned.
    """

    def to_host(self, host: HostBytes, to: tuple[int, ...], device: torch.Tensor, of: tuple[int, ...]) -> None:
        with torch.inference_mode():
            for into, source in zip(to, of, strict=True):
                torch.from_numpy(host[into]).copy_(device[source], non_blocking=True)

    def to_device(self, device: torch.Tensor, to: tuple[int, ...], host: HostBytes, of: tuple[int, ...]) -> None:
        with torch.inference_mode():
            for into, source in zip(to, of, strict=True):
                device[into].copy_(torch.from_numpy(host[source]), non_blocking=True)


@attrs.frozen(kw_only=True, eq=False)
class TierParts:
    """What a host tier needs beside its buffers where the device's memory is not the host's.

    Attributes:
        pin: make memory of the host such that the driver copies it without a wait; until the device is closed.
    """

    counters: Callable[[], LayersArrived]
    mover: BlockMover
    pin: Callable[[HostBytes], None]


def copy_out(values: torch.Tensor, into: HostBytes) -> None:
    """The bytes of `values` to host memory, without a look at them: where the device is another, nothing waits."""
    torch.from_numpy(into).view(values.dtype).copy_(values, non_blocking=True)


def copy_in(kept: HostBytes, into: torch.Tensor) -> None:
    """The way back."""
    into.copy_(torch.from_numpy(kept).view(into.dtype), non_blocking=True)


def _array(device: torch.Tensor) -> HostBytes:
    with torch.inference_mode():
        view: HostBytes = device.numpy()
    return view
