"""What tells the JIT monitor of compilations: Triton's hooks and the callbacks of ``torch.compile``.

Both libraries take seconds to import. On a device that needs neither they are not imported for the
monitor's sake, but hooked where something else has imported them: at the bootstrap and at the mark.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import attrs
import torch

from tokenspeed.device.jit_monitor import Compilation, JitMonitor

TRITON, DYNAMO = "triton", "torch._dynamo"
_FOREIGN = (str(Path(torch.__file__).parent), contextlib.__file__, __file__)


class Begun(threading.local):
    """When the compilations that run on this thread began, by key. Writer: the hooks."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}

    def end(self, key: str) -> float:
        """Seconds since its begin; 0.0 if that was not seen."""
        now = time.perf_counter()
        return now - self.at_s.pop(key, now)


@attrs.define(eq=False)
class Hooked:
    """Writer: JitSources."""

    libraries: set[str] = attrs.field(factory=set[str])


@attrs.frozen(kw_only=True, eq=False)
class JitSources:
    """The hooks in the libraries; `close` takes them out again."""

    monitor: JitMonitor
    undo: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    hooked: Hooked = attrs.field(factory=Hooked)

    def catch_up(self) -> None:
        """Hook every library that is imported by now and was not before."""
        for name, hook in ((TRITON, hook_triton), (DYNAMO, hook_dynamo)):
            if name in sys.modules and name not in self.hooked.libraries:
                self.hooked.libraries.add(name)
                self.undo.callback(hook(self.monitor))

    def close(self) -> None:
        self.undo.close()


def open_sources(monitor: JitMonitor, *, device_type: str) -> JitSources:
    """Hook what is there; a graphics device's kernels are Triton's, so for one Triton is imported."""
    if device_type == "cuda":
        import triton  # noqa: F401 - see the module's text
    sources = JitSources(monitor=monitor)
    sources.catch_up()
    return sources


def hook_triton(monitor: JitMonitor, runtime: Any = None) -> Callable[[], None]:
    """Have Triton call before and after it compiles a kernel; returns what takes the hooks out.

    Hooks that were there go on being called.

    Args:
        runtime: has the two hooks; None: ``triton.knobs.runtime``.
    """
    if runtime is None:
        from triton import knobs

        runtime = knobs.runtime
    begun, earlier = Begun(), (runtime.jit_cache_hook, runtime.jit_post_compile_hook)

    def before(*, key: str, fn: Any, **fields: Any) -> bool | None:
        begun.at_s[key] = time.perf_counter()
        monitor.starting(_kernel_of(fn), _caller("/triton/"))
        skip: bool | None = earlier[0](key=key, fn=fn, **fields) if earlier[0] else None
        if skip:
            begun.end(key)
        return skip

    def after(*, key: str, fn: Any, **fields: Any) -> bool | None:
        event = Compilation(
            kernel=_kernel_of(fn),
            site=_caller("/triton/"),
            seconds=begun.end(key),
            key=key,
            constants=_constants(fn, fields["compile"].get("constants")),
        )
        told: bool | None = earlier[1](key=key, fn=fn, **fields) if earlier[1] else None
        monitor.compiled(event)
        return told

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after

    def undo() -> None:
        if runtime.jit_cache_hook is before:
            runtime.jit_cache_hook = earlier[0]
        if runtime.jit_post_compile_hook is after:
            runtime.jit_post_compile_hook = earlier[1]

    return undo


def _kernel_of(fn: Any) -> str:
    return f"{fn.module}.{fn.name}"


def _constants(fn: Any, constants: Any) -> tuple[tuple[str, str], ...]:
    """By parameter name. Triton gives them by position, as ``(index,)`` or index."""
    names = tuple(getattr(fn.jit_function, "arg_names", ()))
    found = []
    for place, value in (constants or {}).items():
        index = place[0] if isinstance(place, tuple) else place
        found.append((names[index] if isinstance(index, int) and index < len(names) else str(place), repr(value)))
    return tuple(found)


def hook_dynamo(monitor: JitMonitor) -> Callable[[], None]:
    """Have ``torch.compile`` call before and after it compiles a frame; returns what takes the callbacks out."""
    from torch._dynamo.callback import CallbackArgs, callback_handler

    begun = Begun()

    def before(args: CallbackArgs) -> None:
        begun.at_s[args.compile_id] = time.perf_counter()
        monitor.starting(_traced()[0], _caller())

    def after(args: CallbackArgs) -> None:
        if sys.exc_info()[0] is not None:
            begun.end(args.compile_id)  # it failed, or was refused: nothing was compiled
            return
        kernel, cause = _traced()
        # "frame/number": the number counts compilations of one frame.
        again = not args.compile_id.endswith("/0")
        monitor.compiled(
            Compilation(
                kernel=kernel,
                site=_caller(),
                seconds=begun.end(args.compile_id),
                key=args.compile_id,
                cause=cause or ("the guards of earlier compilations fail" if again else "its first call"),
            )
        )

    callback_handler.register_start_callback(before)
    callback_handler.register_end_callback(after)

    def undo() -> None:
        callback_handler.remove_start_callback(before)
        callback_handler.remove_end_callback(after)

    return undo


def _traced() -> tuple[str, str]:
    """The function that torch compiles on this thread, and why again, as far as its frames tell."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_locals.get("code") if frame.f_code.co_name == "_compile" else None
        if isinstance(code, CodeType):
            reason = str(frame.f_locals.get("recompile_reason") or "").partition("\n")[0]
            return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})", reason
        frame = frame.f_back
    return "a graph of torch.compile", ""


def _caller(*foreign: str) -> str:
    """file:line of the nearest caller outside torch, this module and paths that contain one of `foreign`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_FOREIGN) or any(part in frame.f_code.co_filename for part in foreign)
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
