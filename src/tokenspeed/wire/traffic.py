"""What an engine's control thread and its wire thread hand each other."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import attrs

from tokenspeed.plane.messages import FrontendMessage, GenerateRequest
from tokenspeed.plane.ports import Wakeup
from tokenspeed.wire.codec import Answer

OUTBOX_LIMIT = 16384
"""Messages a frontend may be behind before it counts as gone: minutes of rounds, not a hiccup."""

INBOX_SLACK = 64

RECEIVED_AT_ONCE = 32
"""Messages that one round takes. A submission costs up to 100 us on its way to the scheduler, so that a burst of
any size holds decodes up by some 3 ms a round at most."""


@attrs.frozen
class Death:
    """Tell the frontend that this engine has failed."""


Outgoing: TypeAlias = Answer | Death


@attrs.define(eq=False)
class TrafficState:
    """Writers: the control thread appends to `outgoing` and asks to close; the wire side does the rest."""

    incoming: deque[FrontendMessage] = attrs.field(factory=deque[FrontendMessage])
    outgoing: deque[Outgoing] = attrs.field(factory=deque[Outgoing])
    gone: bool = False
    closing: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Traffic:
    """Both queues of one engine. Deques are shared between two threads without a lock: one appends, one pops.

    Attributes:
        max_requests: requests that may wait to be received. The loop empties the queue
            in slices and refuses what exceeds its own limit, so this bound is met only by a burst far
            beyond that limit, or while a round stalls.
    """

    wakeup: Wakeup
    max_requests: int
    state: TrafficState = attrs.field(factory=TrafficState)

    def arrive(self, message: FrontendMessage) -> bool:
        """Wire side. False: the queue is full and the request was not taken; all else always fits."""
        if isinstance(message, GenerateRequest) and len(self.state.incoming) >= self.max_requests:
            return False
        self.state.incoming.append(message)
        self.wakeup.set()
        return True

    def received(self) -> tuple[FrontendMessage, ...]:
        """Control thread: the oldest :data:`RECEIVED_AT_ONCE` messages; while some are left, no wait blocks."""
        incoming = self.state.incoming
        if not incoming:
            return ()
        messages = tuple([incoming.popleft() for _ in range(min(len(incoming), RECEIVED_AT_ONCE))])
        if incoming:
            self.wakeup.set()
        return messages

    def lost(self) -> None:
        """The frontend is gone: the engine is to notice at once (FW-5)."""
        self.state.gone = True
        self.wakeup.set()


def traffic_for(*, max_waiting: int, wakeup: Wakeup) -> Traffic:
    return Traffic(wakeup=wakeup, max_requests=2 * max_waiting + INBOX_SLACK)
