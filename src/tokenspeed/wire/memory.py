"""Both ends of the wire within one process: the same values, without frames.

The control thread only appends to a queue. A thread of the frontend's side takes events from it and
calls the listener, so that a slow listener delays itself and never a round.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import (
    ControlReply,
    EngineEvent,
    EngineGone,
    EngineInfo,
    FrontendMessage,
    GenerateRequest,
    OutputBatch,
)
from tokenspeed.plane.ports import Wakeup
from tokenspeed.wire.outputs import refused_for_room
from tokenspeed.wire.traffic import OUTBOX_LIMIT, Traffic, traffic_for

log = logging.getLogger("tokenspeed.wire")

DIED = "the engine failed"
LEFT = "the engine closed the connection"
DROPPED = "the frontend closed the connection"


@attrs.define(eq=False)
class DeliveryState:
    """Writers: whoever ends the connection, under `lock`; `thread` is set once by `start`."""

    ended: bool = False
    thread: threading.Thread | None = None


@attrs.frozen(kw_only=True, eq=False)
class Delivery:
    """Events on their way to the listener, and the thread that calls it.

    The queue is bounded by :data:`OUTBOX_LIMIT`; beyond it the frontend counts as gone.
    """

    events: queue.SimpleQueue[EngineEvent]
    lock: threading.Lock
    state: DeliveryState = attrs.field(factory=DeliveryState)

    def put(self, event: EngineEvent) -> bool:
        """False: the listener is too far behind; nothing more will be delivered but the end."""
        if self.state.ended:
            return True
        if self.events.qsize() >= OUTBOX_LIMIT:
            return False
        self.events.put(event)
        return True

    def end(self, reason: str) -> None:
        """Deliver the one `EngineGone`; later calls do nothing."""
        with self.lock:
            if not self.state.ended:
                self.state.ended = True
                self.events.put(EngineGone(reason=reason))

    def start(self, listener: Callable[[EngineEvent], None]) -> None:
        with self.lock:
            if self.state.thread is not None:
                raise InvariantBroken("a link has one listener")
            self.state.thread = threading.Thread(target=self._run, args=(listener,), name="ts-wire", daemon=True)
            self.state.thread.start()

    def join(self) -> None:
        thread = self.state.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, listener: Callable[[EngineEvent], None]) -> None:
        event: EngineEvent | None = None
        while not isinstance(event, EngineGone):
            event = self.events.get()
            try:
                listener(event)
            except Exception:
                # The listener is the frontend's code; its fault must not silence the engine.
                log.exception("the listener failed on an event")


@attrs.frozen(kw_only=True, eq=False)
class MemoryFrontendLink:
    """The engine's end."""

    traffic: Traffic
    delivery: Delivery

    def receive(self) -> tuple[FrontendMessage, ...]:
        return self.traffic.received()

    def send(self, batch: OutputBatch) -> None:
        self._deliver(batch)

    def reply(self, reply: ControlReply) -> None:
        self._deliver(reply)

    def announce_death(self) -> None:
        """Tell the frontend that the engine failed. Follow with `close`."""
        self.delivery.end(DIED)

    @property
    def gone(self) -> bool:
        return self.traffic.state.gone

    def close(self) -> None:
        self.traffic.state.closing = True
        self.delivery.end(LEFT)

    def _deliver(self, event: OutputBatch | ControlReply) -> None:
        if not self.delivery.put(event):
            log.error("the frontend is %d messages behind and counts as gone", OUTBOX_LIMIT)
            self.traffic.lost()
            self.delivery.end(DROPPED)


@attrs.frozen(kw_only=True, eq=False)
class MemoryEngineLink:
    """The frontend's end. Owns the thread that calls the listener; `close` joins it."""

    info: EngineInfo
    traffic: Traffic
    delivery: Delivery

    def send(self, message: FrontendMessage) -> None:
        if self.traffic.state.gone or self.traffic.state.closing:
            return
        if not self.traffic.arrive(message) and isinstance(message, GenerateRequest):
            limit, index = self.traffic.max_requests, self.info.engine_index
            self.delivery.put(refused_for_room(message.rid, limit, engine_index=index))

    def subscribe(self, listener: Callable[[EngineEvent], None]) -> None:
        self.delivery.start(listener)

    def close(self) -> None:
        """Ends the engine like any frontend that left. Waits for the listener to return."""
        self.traffic.lost()
        self.delivery.end(DROPPED)
        self.delivery.join()


def memory_pair(info: EngineInfo, wakeup: Wakeup) -> tuple[MemoryFrontendLink, MemoryEngineLink]:
    """The two ends of one engine's wire: the engine's, then the frontend's."""
    traffic = traffic_for(max_waiting=info.max_waiting, wakeup=wakeup)
    delivery = Delivery(events=queue.SimpleQueue(), lock=threading.Lock())
    return (
        MemoryFrontendLink(traffic=traffic, delivery=delivery),
        MemoryEngineLink(info=info, traffic=traffic, delivery=delivery),
    )
