"""A frontend's view of one engine over ZeroMQ: where it stands, its link, and delivery to its listener."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import attrs

from tokenspeed.plane.messages import EngineEvent, EngineGone, EngineInfo, FrontendMessage
from tokenspeed.wire.codec import FrontendCodec
from tokenspeed.wire.waker import Waker

log = logging.getLogger("tokenspeed.wire")

EARLY_LIMIT = 256
"""Events kept for a listener that has not subscribed yet: before it sends, they are load reports."""


class Stage(enum.Enum):
    """How far an engine has come."""

    EXPECTED = "expected"
    GREETED = "greeted"
    REGISTERED = "registered"
    GONE = "gone"


@attrs.define(eq=False)
class Mailbox:
    """Events of one engine to its listener, in order; hub thread only."""

    listener: Callable[[EngineEvent], None] | None = None
    early: deque[EngineEvent] = attrs.field(factory=lambda: deque[EngineEvent](maxlen=EARLY_LIMIT))

    def deliver(self, event: EngineEvent) -> None:
        if self.listener is None:
            self.early.append(event)
            return
        try:
            self.listener(event)
        except Exception:
            # The listener is the frontend's code; its fault must not stop the other engines.
            log.exception("the listener failed on an event")

    def subscribe(self, listener: Callable[[EngineEvent], None]) -> None:
        self.listener = listener
        while self.early:
            self.deliver(self.early.popleft())


@attrs.define(eq=False)
class EngineState:
    """Writer: the hub thread.

    Attributes:
        input_fd, output_fd: the engine's connections as the sockets' monitors name them; -1: none.
        until_s: the engine left its input; what it sent before is awaited until then.
        unreadable: undecodable messages in a row.
    """

    stage: Stage = Stage.EXPECTED
    info: EngineInfo | None = None
    codec: FrontendCodec | None = None
    input_fd: int = -1
    output_fd: int = -1
    until_s: float | None = None
    unreadable: int = 0
    mailbox: Mailbox = attrs.field(factory=Mailbox)

    def end(self, reason: str) -> None:
        """The engine's last event; later calls do nothing."""
        if self.stage is not Stage.GONE:
            self.stage = Stage.GONE
            self.mailbox.deliver(EngineGone(reason=reason))


@attrs.frozen(kw_only=True, eq=False)
class Subscribe:
    engine: int
    listener: Callable[[EngineEvent], None]


@attrs.frozen(kw_only=True, eq=False)
class Submit:
    engine: int
    message: FrontendMessage


@attrs.frozen(kw_only=True)
class Drop:
    """Close the connection to this engine; None: to all, and end the hub."""

    engine: int | None


Command: TypeAlias = Subscribe | Submit | Drop


@attrs.define(kw_only=True, eq=False)
class Commands:
    """What other threads want of the hub thread, in order: they append, the hub thread takes.

    Unbounded here: what waits was admitted by the frontend, which bounds its requests in flight.
    """

    waker: Waker
    queue: deque[Command] = attrs.field(factory=deque[Command])

    def put(self, command: Command) -> None:
        self.queue.append(command)
        self.waker.wake()


@attrs.frozen(kw_only=True, eq=False)
class ZmqEngineLink:
    """`plane.ports.EngineLink` over the hub's sockets."""

    index: int
    info: EngineInfo
    commands: Commands

    def send(self, message: FrontendMessage) -> None:
        self.commands.put(Submit(engine=self.index, message=message))

    def subscribe(self, listener: Callable[[EngineEvent], None]) -> None:
        self.commands.put(Subscribe(engine=self.index, listener=listener))

    def close(self) -> None:
        """Disconnect from this engine, which then ends; its listener gets the `EngineGone`."""
        self.commands.put(Drop(engine=self.index))
