"""The last step of a rank process's start-up, and the guards it arms."""

from __future__ import annotations

import enum
from typing import Protocol

import attrs

from tokenspeed.device.gc_hooks import Collector, InterpreterCollector, freeze_startup_heap
from tokenspeed.device.jit_monitor import JitMonitor
from tokenspeed.errors import InvariantBroken


class SyncDebugMode(enum.Enum):
    """What happens when the forward thread waits for the device in per-round work."""

    WARN = "warn"
    ERROR = "error"


class SyncDebug(Protocol):
    """Reports waits of the forward thread for the device, once armed."""

    def arm(self) -> None: ...


@attrs.define(eq=False)
class Armed:
    """Writer: HostSyncDebug."""

    armed: bool = False


@attrs.frozen(kw_only=True, eq=False)
class HostSyncDebug:
    """Sync debugging of the CPU backend: knows its mode and whether it was armed.

    It detects nothing yet. A wait on the forward thread has no effect of its own on this backend,
    whose forward thread holds numpy arrays only; the trap that reports one comes with the guard of
    the control thread. Arming is here now so that its place in the start-up order is.
    """

    mode: SyncDebugMode = SyncDebugMode.WARN
    state: Armed = attrs.field(factory=Armed)

    def arm(self) -> None:
        self.state.armed = True


@attrs.define(eq=False)
class Entered:
    """Writer: EnterServing."""

    entered: bool = False


@attrs.frozen(kw_only=True, eq=False)
class EnterServing:
    """What a rank process does once start-up and the frontend handshake are done (SS-11).

    Only a process of the launcher may do it: it changes the garbage collection of the process.
    """

    sync_debug: SyncDebug = attrs.field(factory=HostSyncDebug)
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
