"""An engine's end of the wire over ZeroMQ: dial the frontend, then one thread that owns the sockets.

The engine only connects; the frontend has bound everything (FW-1, FW-2). Decoding what arrives and
encoding a round's outputs both happen on the thread ``ts-wire`` (PT-9).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenspeed.errors import PeerLost
from tokenspeed.plane.messages import ControlReply, EngineInfo, FrontendMessage, GenerateRequest, OutputBatch
from tokenspeed.plane.ports import Wakeup
from tokenspeed.wire.codec import ENGINE_DEAD, Arrival, EngineCodec, EngineEnd
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.handshake import (
    DataAddresses,
    decode_init,
    encode_greeting,
    encode_registration,
    identity_of,
)
from tokenspeed.wire.layouts import LAYOUTS, Layouts
from tokenspeed.wire.outputs import refused_for_room
from tokenspeed.wire.traffic import OUTBOX_LIMIT, Death, Outgoing, Traffic, traffic_for
from tokenspeed.wire.waker import Waker, open_waker

log = logging.getLogger("tokenspeed.wire")

LINGER_S = 2.0
"""How long `close` waits for outputs that the frontend has not taken yet."""

READ_BURST = 64
"""Messages read before outputs get their turn again."""

PEER_LEFT = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED


@attrs.frozen(kw_only=True, eq=False)
class EngineSockets:
    """Wire thread only. `monitor` reports what happens to the connection of `input`."""

    input: zmq.Socket[bytes]
    output: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self, linger_s: float) -> None:
        """Outputs that were handed to the output socket have `linger_s` to leave it."""
        self.output.close(linger=int(linger_s * 1000))
        self.input.disable_monitor()
        self.monitor.close(linger=0)
        self.input.close(linger=0)


@attrs.define(eq=False)
class WireState:
    """Writer: the wire thread. `stuck` is an encoded message that the socket had no room for."""

    stuck: bytes | None = None
    until_s: float | None = None


@attrs.frozen(kw_only=True, eq=False)
class WireThread:
    """The loop of ``ts-wire``: blocks in one poll over the sockets and the waker."""

    traffic: Traffic
    waker: Waker
    sockets: EngineSockets
    codec: EngineEnd
    engine_index: int
    clock_s: Callable[[], float] = time.monotonic
    state: WireState = attrs.field(factory=WireState)

    def run(self) -> None:
        try:
            self._serve()
        except Exception:
            # The engine cannot be heard any more: end it like a frontend that left.
            log.exception("the frontend wire failed")
        finally:
            self.traffic.lost()
            self.sockets.close(0.0 if self.state.until_s is None else self._left_s())

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self.sockets.input, self.sockets.monitor, self.waker):
            poller.register(source, zmq.POLLIN)
        while True:
            blocked = self._write()
            if self.traffic.state.closing:
                self.state.until_s = self.state.until_s or self.clock_s() + LINGER_S
                if not blocked or self._left_s() <= 0.0:
                    return
            if blocked:
                poller.register(self.sockets.output, zmq.POLLOUT)
            elif self.sockets.output in poller:
                poller.unregister(self.sockets.output)
            timeout_ms = None if self.state.until_s is None else int(self._left_s() * 1000) + 1
            ready = dict(poller.poll(timeout_ms))
            if self.waker.fileno() in ready:
                self.waker.drain()
            if self.sockets.input in ready:
                self._read()
            if self.sockets.monitor in ready and self._frontend_left():
                return

    def _left_s(self) -> float:
        return max(0.0, (self.state.until_s or 0.0) - self.clock_s())

    def _read(self) -> None:
        for _ in range(READ_BURST):
            try:
                frames = self.sockets.input.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(self.codec.decode(frames))
            except WireError as exc:
                log.warning("dropped a message from the frontend: %s", exc)

    def _take(self, arrival: Arrival) -> None:
        message = arrival.message
        if message is not None and not self.traffic.arrive(message) and isinstance(message, GenerateRequest):
            refusal = refused_for_room(message.rid, self.traffic.max_requests, engine_index=self.engine_index)
            self.traffic.state.outgoing.append(refusal)
        if arrival.answer is not None:
            self.traffic.state.outgoing.append(arrival.answer)

    def _write(self) -> bool:
        """Hand over what waits, in order. True: the socket is full and something still waits."""
        outgoing = self.traffic.state.outgoing
        while self.state.stuck is not None or outgoing:
            payload = self.state.stuck if self.state.stuck is not None else self._encoded(outgoing.popleft())
            try:
                self.sockets.output.send(payload, zmq.NOBLOCK)
            except zmq.Again:
                self.state.stuck = payload
                return True
            self.state.stuck = None
        return False

    def _encoded(self, event: Outgoing) -> bytes:
        return ENGINE_DEAD if isinstance(event, Death) else self.codec.encode(event)

    def _frontend_left(self) -> bool:
        while self.sockets.monitor.poll(0):
            if recv_monitor_message(self.sockets.monitor)["event"] & PEER_LEFT:
                if not self.traffic.state.closing:
                    log.info("the frontend disconnected")
                return True
        return False


@attrs.frozen(kw_only=True, eq=False)
class ZmqFrontendLink:
    """`plane.ports.FrontendLink` over ZeroMQ. Owns the thread ``ts-wire``; `close` joins it."""

    traffic: Traffic
    waker: Waker
    context: zmq.Context[zmq.Socket[bytes]]
    owns_context: bool
    thread: threading.Thread

    def receive(self) -> tuple[FrontendMessage, ...]:
        return self.traffic.received()

    def send(self, batch: OutputBatch) -> None:
        self._hand_over(batch)

    def reply(self, reply: ControlReply) -> None:
        self._hand_over(reply)

    def announce_death(self) -> None:
        """Tell the frontend that the engine failed: its requests fail at once. Follow with `close`."""
        self._hand_over(Death())

    @property
    def gone(self) -> bool:
        return self.traffic.state.gone

    def close(self) -> None:
        """Wait up to :data:`LINGER_S` for outputs to leave, then disconnect and join the thread."""
        self.traffic.state.closing = True
        self.waker.wake()
        self.thread.join()
        self.waker.close()
        if self.owns_context:
            self.context.destroy()

    def _hand_over(self, event: Outgoing) -> None:
        state = self.traffic.state
        if state.gone or state.closing:
            return
        if len(state.outgoing) >= OUTBOX_LIMIT:
            log.error("the frontend is %d messages behind and counts as gone", OUTBOX_LIMIT)
            self.traffic.lost()
            return
        state.outgoing.append(event)
        self.waker.wake()


def dial_frontend(
    address: str,
    info: EngineInfo,
    *,
    wakeup: Wakeup,
    timeout_s: float,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
    layouts: Layouts = LAYOUTS,
    codec: EngineEnd | None = None,
) -> ZmqFrontendLink:
    """Register with the frontend whose handshake socket is at `address`; either side may start first.

    Args:
        wakeup: set at each arrival, and when the frontend goes.
        timeout_s: how long the frontend may take to answer the greeting.
        layouts: announced to the frontend.
        codec: replaces the wire thread's codec.
    Raises: PeerLost: no answer in time, or one that is not an INIT.
    """
    own = context is None
    ctx: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
    try:
        sockets = _connected(ctx, _greeted(ctx, address, info, timeout_s), info, layouts)
    except BaseException as exc:
        if own:
            ctx.term()
        if isinstance(exc, zmq.ZMQError):
            raise PeerLost(f"cannot connect to a frontend at {address}: {exc}") from exc
        raise
    traffic = traffic_for(max_waiting=info.max_waiting, wakeup=wakeup)
    waker = open_waker()
    end = codec if codec is not None else EngineCodec(engine_index=info.engine_index, layouts=layouts)
    wire = WireThread(traffic=traffic, waker=waker, sockets=sockets, codec=end, engine_index=info.engine_index)
    thread = threading.Thread(target=wire.run, name="ts-wire", daemon=True)
    thread.start()
    return ZmqFrontendLink(traffic=traffic, waker=waker, context=ctx, owns_context=own, thread=thread)


def _greeted(ctx: zmq.Context[zmq.Socket[bytes]], address: str, info: EngineInfo, timeout_s: float) -> DataAddresses:
    """HELLO, INIT, READY on a socket of their own."""
    greeter = ctx.socket(zmq.DEALER)
    linger_ms = 0
    try:
        greeter.identity = identity_of(info.engine_index)
        greeter.connect(address)
        greeter.send(encode_greeting("HELLO", info))
        if not greeter.poll(int(timeout_s * 1000)):
            raise PeerLost(f"no frontend answered at {address} within {timeout_s:g} s")
        addresses = decode_init(greeter.recv_multipart()[-1])
        greeter.send(encode_greeting("READY", info))
        linger_ms = 1000
    except WireError as exc:
        raise PeerLost(f"the frontend at {address} answered the greeting with something else: {exc}") from exc
    finally:
        greeter.close(linger=linger_ms)
    return addresses


def _connected(
    ctx: zmq.Context[zmq.Socket[bytes]], addresses: DataAddresses, info: EngineInfo, layouts: Layouts
) -> EngineSockets:
    """The data sockets. They do not reconnect: another frontend at the same address is another frontend."""
    inward = ctx.socket(zmq.DEALER)
    outward = ctx.socket(zmq.PUSH)
    for socket in (inward, outward):
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.LINGER, 0)
    monitor = inward.get_monitor_socket(PEER_LEFT)
    sockets = EngineSockets(input=inward, output=outward, monitor=monitor)
    try:
        inward.identity = identity_of(info.engine_index)
        inward.connect(addresses.input)
        outward.connect(addresses.output)
        inward.send(encode_registration(info, layouts))
    except BaseException:
        sockets.close(0.0)
        raise
    return sockets
