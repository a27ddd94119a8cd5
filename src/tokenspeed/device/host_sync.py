"""Waits of the host for its device: the marks that allow them, and the one road for host-built metadata.

Per-round work of the forward thread must not wait for the device: with a step in flight the next one
could only be prepared and launched once it has ended, and nothing would overlap. `device.sync_trap`
and torch's own mode on CUDA report such waits; the marks here tell them what is no fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from tokenspeed.device.backends.base import HostArray

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def allow_host_sync() -> Generator[None, None, None]:
    """A deliberate wait, outside the per-round path (DP-64). Nests; what it allowed ends with it, also by a raise.

    On CUDA the mode belongs to the process: it is off for all threads meanwhile.
    """
    cuda = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]  # torch leaves it so
    if cuda:
        torch.cuda.set_sync_debug_mode(0)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode(cuda)


def allowed_wait(why: str) -> AbstractContextManager[None]:
    """`allow_host_sync` for a registered wait within a round; `why` is for whoever counts them."""
    del why
    return allow_host_sync()


def device_code(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a kernel of the CPU: the device itself, which reads its own memory as it likes.

    For what a graphics device would have as a kernel, and for nothing that decides or submits.
    Nothing inside is watched, so a call that makes many small tensor operations costs no more.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def host_to_device(array: HostArray, device: torch.device) -> torch.Tensor:
    """`array` on `device`, on its way without a wait of the host (DP-58).

    Out of contiguous memory, and for CUDA out of pinned memory: a copy from pageable memory waits for
    the stream. On the CPU the tensor is the array itself if that is contiguous. Nobody may write
    `array` afterwards.
    """
    host = torch.from_numpy(array if array.flags.c_contiguous else np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
