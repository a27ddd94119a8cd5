"""The last step of a rank process's start-up, and the guards it arms."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import attrs
import torch

from tokenspeed.device.gc_hooks import Collector, InterpreterCollector, freeze_startup_heap
from tokenspeed.device.jit_monitor import JitMonitor
from tokenspeed.device.sync_trap import SWITCH, SyncDebugMode, SyncTrap
from tokenspeed.errors import InvariantBroken, SettingsError

Watched: TypeAlias = AbstractContextManager[object]


class SyncDebug(Protocol):
    """Reports waits of per-round work for the device, once armed; it cannot be disarmed."""

    def arm(self) -> None: ...

    def watching(self) -> Watched:
        """To be entered around per-round work: each operation of ``ts-forward`` and job of the exec stream."""
        ...


@attrs.define(eq=False)
class Armed:
    """Writer: HostSyncDebug. Read by the watched threads; goes from False to True once."""

    armed: bool = False


class Turns(threading.local):
    """Pieces of work that the calling thread has begun since arming. Writer: HostSyncDebug."""

    def __init__(self) -> None:
        self.begun = 0


UNWATCHED: Watched = nullcontext()

WARN_EVERY = 17
"""Of so many pieces of work on a thread one is watched where a wait is only reported: the trap costs about
5 us a tensor operation, and what waits in per-round work waits in other rounds, too. A prime, so that it
keeps step with no pattern of jobs."""


@attrs.frozen(kw_only=True, eq=False)
class HostSyncDebug:
    """Sync debugging of the CPU: until it is armed nothing is watched, so that start-up may wait (DP-60).

    Attributes:
        every: one of so many pieces of work on a thread is watched, beginning with the first.
    """

    trap: SyncTrap
    every: int = 1
    state: Armed = attrs.field(factory=Armed)
    turns: Turns = attrs.field(factory=Turns)

    def arm(self) -> None:
        self.state.armed = True

    def watching(self) -> Watched:
        if not self.state.armed:
            return UNWATCHED
        turn, self.turns.begun = self.turns.begun, self.turns.begun + 1
        return self.trap if turn % self.every == 0 else UNWATCHED


@attrs.frozen(kw_only=True, eq=False)
class CudaSyncDebug:
    """Sync debugging of CUDA: torch's own mode, which the driver's entry points ask, for the whole process.

    Waiting for an event and copying without blocking pass it (DP-63).
    """

    mode: SyncDebugMode
    set_mode: Callable[[str], None] = torch.cuda.set_sync_debug_mode

    def arm(self) -> None:
        self.set_mode(self.mode.value)

    def watching(self) -> Watched:
        return UNWATCHED


def sync_debug(environ: Mapping[str, str] | None = None, *, device_type: str = "cpu") -> SyncDebug:
    """What the environment asks for; None: this process's. Without a word: ``warn`` (DP-61).

    Raises: SettingsError: the variable has another value; sync debugging cannot be left off (DP-59).
    """
    asked = (os.environ if environ is None else environ).get(SWITCH) or SyncDebugMode.WARN.value
    known = {mode.value: mode for mode in SyncDebugMode}
    if asked not in known:
        raise SettingsError(f"{SWITCH}: {asked!r} is not one of {', '.join(known)}; it cannot be switched off")
    if device_type == "cuda":
        return CudaSyncDebug(mode=known[asked])
    mode = known[asked]
    return HostSyncDebug(trap=SyncTrap(mode), every=1 if mode is SyncDebugMode.ERROR else WARN_EVERY)


@attrs.define(eq=False)
class Entered:
    """Writer: EnterServing."""

    entered: bool = False


@attrs.frozen(kw_only=True, eq=False)
class EnterServing:
    """What a rank process does once start-up and the frontend handshake are done (SS-11).

    Only a process of the launcher may do it: it changes the garbage collection of the process.
    """

    sync_debug: SyncDebug
    jit: JitMonitor
    collector: Collector = attrs.field(factory=InterpreterCollector)
    state: Entered = attrs.field(factory=Entered)

    def enter(self) -> None:
        """Arm sync debugging, set the mark, freeze the heap: in this order, once, nothing between."""
        if self.state.entered:
            raise InvariantBroken("a rank entered serving twice")
        self.state.entered = True
        self.sync_debug.arm()
        self.jit.enter_serving()
        freeze_startup_heap(self.collector)
