"""A guard on the control thread: a tensor operation there raises instead of starting device work.

By construction nothing in the control plane can reach a tensor; the guard catches what slips in all
the same, an operation that was not routed through the forward thread. It is local to the thread that
enters it. Waiting on events passes, and so do views, which change metadata only: neither submits
device work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tokenspeed.errors import InvariantBroken

SWITCH = "TOKENSPEED_GUARD_CONTROL_PLANE"
"""Set to 0 to serve on although an operation trips the guard; report such an operation."""


class ControlPlaneGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Raises InvariantBroken for an operation that reads or makes a tensor on `device_type`."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.device_type = device_type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not func.is_view and (self._touches(args, named) or self._makes(named)):
            raise InvariantBroken(
                f"a tensor operation on the control thread: queue it for the forward thread ({SWITCH}=0 lets it pass)",
                operation=str(func),
            )
        return func(*args, **named)

    def _touches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(
            isinstance(item, torch.Tensor) and item.device.type == self.device_type
            for item in tree_iter((args, kwargs))
        )

    def _makes(self, kwargs: dict[str, Any]) -> bool:
        """A factory without tensor arguments puts its result on the device it names, or the default one."""
        if any(isinstance(item, torch.Tensor) for item in tree_iter(kwargs)):
            return False
        device = kwargs.get("device") or torch.get_default_device()
        return torch.device(device).type == self.device_type


def control_plane_guard(environ: Mapping[str, str], *, device_type: str) -> AbstractContextManager[object]:
    """The guard for one thread's serving time; nothing if the environment switches it off (DP-22)."""
    if environ.get(SWITCH) == "0":
        return contextlib.nullcontext()
    return ControlPlaneGuard(device_type)
