"""Copies that are under way, and their acknowledgments: one for each operation, once (CT-12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from tokenspeed.device.backends.base import DeviceEvent
from tokenspeed.errors import DeviceLost, InvariantBroken
from tokenspeed.plane.plan import DeviceCacheOp, LoadBackOp, RestoreOp, SnapshotOp, WriteBackOp
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import NO_ACKS, CacheAcks

KINDS: Mapping[type, str] = MappingProxyType(
    {
        WriteBackOp: "write_backs",
        LoadBackOp: "load_backs",
        SnapshotOp: "snapshots",
        RestoreOp: "restores",
    }
)
"""The field of `CacheAcks` that an operation's id goes to."""


@attrs.frozen(eq=False)
class OpenCopy:
    """An operation whose copy ends with `event`."""

    op: DeviceCacheOp
    event: DeviceEvent


@attrs.define(eq=False)
class OpenState:
    """Writers: ``ts-forward`` adds, the thread that asks takes; under the lock.

    Attributes:
        told: so many of `copies`, from the front, have a wakeup already.
    """

    copies: list[OpenCopy] = attrs.field(factory=list[OpenCopy])
    told: int = 0
    closed: bool = False


@attrs.frozen(eq=False)
class OpenCopies:
    """Bounded by the scheduler, whose every open operation pins blocks."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    state: OpenState = attrs.field(factory=OpenState)

    def __len__(self) -> int:
        return len(self.state.copies)

    def add(self, op: DeviceCacheOp, event: DeviceEvent) -> None:
        with self.lock:
            self.state.copies.append(OpenCopy(op, event))

    def check_open(self) -> None:
        """Raises: InvariantBroken: no copy is taken any more."""
        if self.state.closed:
            raise InvariantBroken("a host tier used after its shutdown")

    def notify(self, wakeup: Wakeup) -> None:
        """Have `wakeup` set at the end of every copy added since the last call."""
        with self.lock:
            fresh, self.state.told = self.state.copies[self.state.told :], len(self.state.copies)
        for event in dict.fromkeys(copy.event for copy in fresh):
            event.notify(wakeup)

    def take(self) -> CacheAcks:
        """Acknowledge what has ended since the last call. Raises: what a copy raised."""
        with self.lock:
            copies, told = self.state.copies, self.state.told
            if not copies:
                return NO_ACKS
            ended = [copy.event.query() for copy in copies]
            done = [copy for copy, over in zip(copies, ended, strict=True) if over]
            self.state.copies = [copy for copy, over in zip(copies, ended, strict=True) if not over]
            self.state.told = told - sum(ended[:told])
        found: dict[str, list[int]] = {}
        for copy in done:
            copy.event.wait()  # it has ended: this only raises
            found.setdefault(KINDS[type(copy.op)], []).append(copy.op.op_id)
        return CacheAcks(**{kind: tuple(ids) for kind, ids in found.items()}) if found else NO_ACKS

    def close(self, timeout_s: float) -> None:
        """Take no more, and wait for what is under way.

        Raises: DeviceLost: it has not ended after `timeout_s`.
        """
        with self.lock:
            self.state.closed = True
            copies = tuple(self.state.copies)
        until = time.monotonic() + timeout_s
        for copy in copies:
            ended = Ended()
            copy.event.notify(ended)
            if not ended.wait(max(0.0, until - time.monotonic())):
                raise DeviceLost(f"a copy of the host tier did not end within {timeout_s:g} s: {copy.op}")


@attrs.frozen(eq=False)
class Ended:
    """`Wakeup` that is set once."""

    event: threading.Event = attrs.field(factory=threading.Event)

    def set(self) -> None:
        self.event.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self.event.wait(timeout_s)
