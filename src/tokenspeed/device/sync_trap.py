"""Reports waits for the CPU device that would stall a stream of a graphics device.

The CPU needs no copy to read a tensor, so nothing would show a value that is read back too early.
While the trap is entered, each call of torch's interface on that thread passes it, and the forms
that make the host wait are reported: in per-round work all tensors are the device's, because what
the host side knows it keeps as numpy arrays. Code that is itself the device is marked with
`host_sync.device_code` and is not looked at.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch
from torch.overrides import TorchFunctionMode

from tokenspeed.errors import InvariantBroken

log = logging.getLogger(__name__)

SWITCH = "TOKENSPEED_DATA_PLANE_SYNC_DEBUG"


class SyncDebugMode(enum.Enum):
    """What happens when per-round work waits for the device."""

    WARN = "warn"
    ERROR = "error"


Form: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], bool]
"""Whether a call with these arguments makes the host wait."""


def _always(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return True


def _to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(_is_host(value) for value in (*args[1:], kwargs.get("device")))


def _is_host(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cpu") or value == "cpu"


def _of_host_data(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return not (args and isinstance(args[0], torch.Tensor))


def _by_mask(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """A Boolean mask becomes indices by `nonzero`."""
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) and i.dtype in {torch.bool, torch.uint8} for i in indices)


def _one_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) + len(kwargs) == 1


def _forms() -> Mapping[Callable[..., Any], tuple[str, Form]]:
    """Entry points of torch that wait, with a name and the condition."""
    tensor: Any = torch.Tensor
    waits: dict[str, tuple[Any, ...]] = {
        ".item()": (tensor.item,),
        ".tolist()": (tensor.tolist,),
        ".cpu()": (tensor.cpu,),
        ".numpy()": (tensor.numpy, tensor.__array__),
        "bool(tensor)": (tensor.__bool__, tensor.is_nonzero, torch.is_nonzero),
        "int(tensor)": (tensor.__int__, tensor.__index__),
        "float(tensor)": (tensor.__float__, tensor.__complex__),
        "in tensor": (tensor.__contains__,),
        "text of a tensor": (tensor.__repr__, tensor.__format__),
        "nonzero": (tensor.nonzero, torch.nonzero, tensor.argwhere, torch.argwhere),
        "masked_select": (tensor.masked_select, torch.masked_select),
        "unique": (tensor.unique, torch.unique, tensor.unique_consecutive, torch.unique_consecutive),
        "equal": (tensor.equal, torch.equal, tensor.allclose, torch.allclose),
    }
    found: dict[Any, tuple[str, Form]] = {
        function: (name, _always) for name, functions in waits.items() for function in functions
    }
    found[tensor.to] = (".to('cpu')", _to_host)
    found[tensor.__getitem__] = ("a Boolean mask as index", _by_mask)
    found[tensor.__setitem__] = ("a Boolean mask as index", _by_mask)
    found[torch.where] = ("nonzero", _one_argument)
    for function in (torch.tensor, torch.as_tensor, torch.asarray):
        found[function] = ("a copy from pageable memory", _of_host_data)
    return MappingProxyType(found)


WAITING_FORMS = _forms()
_HERE = Path(__file__)
_SKIPPED = (str(Path(torch.__file__).parent), __file__, str(_HERE.parent / "backends" / "host_stream.py"))


@attrs.define(eq=False)
class Sites:
    """Writer: SyncTrap, under `lock`. Places that were reported; one entry a source line at most."""

    seen: set[str] = attrs.field(factory=set[str])
    lock: threading.Lock = attrs.field(factory=threading.Lock)


class SyncTrap(TorchFunctionMode):
    """Enter it around per-round work, on as many threads as there are, one object for all."""

    def __init__(self, mode: SyncDebugMode) -> None:
        super().__init__()
        self.mode = mode
        self.sites = Sites()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        form = WAITING_FORMS.get(func)
        if form is not None and form[1](args, named):
            self.report(form[0])
        return func(*args, **named)

    def report(self, what: str) -> None:
        """Per-round work is about to wait for the device.

        Raises: InvariantBroken: in mode ``error``; the device was not waited for.
        """
        at = _place()
        if self.mode is SyncDebugMode.ERROR:
            raise InvariantBroken(
                f"per-round work waits for the device; keep the value there, or send it by Backend.to_host "
                f"({SWITCH}=warn only reports)",
                form=what,
                at=at,
                thread=threading.current_thread().name,
            )
        with self.sites.lock:
            if at in self.sites.seen:
                return
            self.sites.seen.add(at)
        log.warning("%s: %s waits for the device in per-round work (reported once)", at, what)


def note_wait(what: str) -> None:
    """Called where the host is about to wait for an event of a device; the calling thread's trap reports it."""
    if torch._C._is_torch_function_mode_enabled():
        trap = torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1)
        if isinstance(trap, SyncTrap):
            trap.report(what)


def _place() -> str:
    """file:line (function) of the nearest caller outside torch and the places that report."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
