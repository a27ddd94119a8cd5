"""A frontend's end of the wire over ZeroMQ: bind the sockets, register engines, one thread that owns it all.

Each engine is told data addresses of its own in INIT, so that its connection can be watched and
closed alone. A connection is known by the descriptor that both its messages and the sockets' monitors
name: a stranger that connects and leaves is not mistaken for the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import attrs
import zmq

from tokenspeed.errors import PeerLost
from tokenspeed.plane.messages import GenerateRequest, Refusal
from tokenspeed.wire.codec import ENGINE_DEAD, FrontendCodec
from tokenspeed.wire.engines import Commands, Drop, EngineState, Stage, Submit, Subscribe, ZmqEngineLink
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.handshake import (
    MAX_ENGINES,
    decode_greeting,
    decode_registration,
    encode_init,
    identity_of,
)
from tokenspeed.wire.hub_sockets import EngineSockets, bind_data, bound_at, connections_ended, descriptor_of
from tokenspeed.wire.outputs import refused
from tokenspeed.wire.waker import open_waker

log = logging.getLogger("tokenspeed.wire")

LOOPBACK = "tcp://127.0.0.1:*"
LAST_WORDS_S = 1.0
"""How long an engine that left its input may still be read from."""

MAX_UNREADABLE = 3
"""Undecodable messages in a row after which an engine counts as gone."""

READ_BURST = 64


@attrs.frozen(kw_only=True, eq=False)
class EngineSlot:
    """An engine that may register: its sockets and where it stands."""

    index: int
    sockets: EngineSockets
    state: EngineState = attrs.field(factory=EngineState)


@attrs.define(eq=False)
class HubState:
    """Writer: the hub thread, under `changed`."""

    registered: int = 0
    failure: str = ""
    ended: bool = False
    changed: threading.Condition = attrs.field(factory=threading.Condition)


@attrs.frozen(kw_only=True, eq=False)
class HubThread:
    """The loop of ``ts-hub``: blocks in one poll over all sockets and the waker."""

    handshake: zmq.Socket[bytes]
    slots: tuple[EngineSlot, ...]
    commands: Commands
    state: HubState
    clock_s: Callable[[], float] = time.monotonic

    def run(self) -> None:
        try:
            self._serve()
        except Exception as exc:
            log.exception("the engine wire failed")
            self._fail(f"the engine wire failed: {exc}")
        finally:
            for slot in self.slots:
                slot.state.end("the frontend closed the connection")
                slot.sockets.close()
            self.handshake.close(linger=0)
            with self.state.changed:
                self.state.ended = True
                self.state.changed.notify_all()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self.commands.waker, zmq.POLLIN)
        poller.register(self.handshake, zmq.POLLIN)
        for slot in self.slots:
            for socket in slot.sockets.all:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience_ms()))
            if self.commands.waker.fileno() in ready and not self._obey():
                return
            if self.handshake in ready:
                self._greet()
            for slot in self.slots:
                if slot.state.stage is not Stage.GONE:
                    self._attend(slot, ready)
                if slot.state.stage is Stage.GONE and slot.sockets.input in poller:
                    for socket in slot.sockets.all:
                        poller.unregister(socket)
                    slot.sockets.close()

    def _patience_ms(self) -> int | None:
        waits = [slot.state.until_s for slot in self.slots if slot.state.until_s is not None]
        return max(0, int((min(waits) - self.clock_s()) * 1000) + 1) if waits else None

    # ---- what other threads want ---------------------------------------------------------------

    def _obey(self) -> bool:
        """False: the hub is to end."""
        self.commands.waker.drain()
        queue = self.commands.queue
        while queue:
            match queue.popleft():
                case Drop(engine=None):
                    return False
                case Drop(engine=int() as index):
                    self._end(self.slots[index], "the frontend closed the connection")
                case Subscribe(engine=index, listener=listener):
                    self.slots[index].state.mailbox.subscribe(listener)
                case Submit() as submit:
                    self._submit(self.slots[submit.engine], submit)
        return True

    def _submit(self, slot: EngineSlot, submit: Submit) -> None:
        codec, message = slot.state.codec, submit.message
        if codec is None or slot.state.stage is Stage.GONE:
            return
        try:
            frames = codec.encode(message)
        except WireError as exc:
            log.warning("engine %d: a message cannot be sent: %s", slot.index, exc)
            if isinstance(message, GenerateRequest):
                refusal = Refusal(rid=message.rid, status=400, message=str(exc), field=exc.field)
                slot.state.mailbox.deliver(refused(refusal, engine_index=slot.index))
            return
        # An identity that is no longer connected takes nothing: the monitor tells, and `_attend` ends the engine.
        slot.sockets.input.send_multipart([identity_of(slot.index), *frames])

    # ---- registration --------------------------------------------------------------------------

    def _greet(self) -> None:
        frames = self.handshake.recv_multipart()
        try:
            slot = self._slot_of(frames)
            status = decode_greeting(frames[1])
        except WireError as exc:
            log.warning("refused a greeting: %s", exc)
            return
        if status == "HELLO" and slot.state.stage is Stage.EXPECTED:
            slot.state.stage = Stage.GREETED
            self.handshake.send_multipart([frames[0], encode_init(slot.sockets.addresses())])
        elif status == "HELLO":
            log.warning("refused a greeting: engine %d has greeted before", slot.index)

    def _slot_of(self, frames: list[bytes]) -> EngineSlot:
        if len(frames) != 2:
            raise WireError("frame", f"{len(frames)} frames instead of an identity and a greeting")
        for slot in self.slots:
            if frames[0] == identity_of(slot.index):
                return slot
        raise WireError("identity", f"{frames[0].hex()} is not one of {len(self.slots)} expected engines")

    def _register(self, slot: EngineSlot) -> None:
        try:
            frames = slot.sockets.input.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        if slot.state.stage is not Stage.GREETED or len(frames) != 2 or frames[0].bytes != identity_of(slot.index):
            log.warning("engine %d: ignored a message that is not its registration", slot.index)
            return
        try:
            registered = decode_registration(frames[1].bytes)
        except WireError as exc:
            self._fail(f"engine {slot.index} cannot be used: {exc}")
            return
        slot.state.info = attrs.evolve(registered.info, engine_index=slot.index)
        slot.state.codec = FrontendCodec(layouts=registered.layouts)
        slot.state.input_fd = descriptor_of(frames[1])
        slot.state.stage = Stage.REGISTERED
        with self.state.changed:
            self.state.registered += 1
            self.state.changed.notify_all()

    def _fail(self, why: str) -> None:
        with self.state.changed:
            self.state.failure = self.state.failure or why
            self.state.changed.notify_all()

    # ---- a registered engine -------------------------------------------------------------------

    def _attend(self, slot: EngineSlot, ready: dict[object, int]) -> None:
        sockets, state = slot.sockets, slot.state
        # A connection's end is reported behind its last message, so messages are read first.
        if sockets.input in ready or sockets.input_monitor in ready:
            self._register(slot)
        if sockets.output in ready or sockets.output_monitor in ready:
            self._read(slot, READ_BURST)
        if sockets.output_monitor in ready and state.output_fd in connections_ended(sockets.output_monitor):
            self._end(slot, "it disconnected")
        left = sockets.input_monitor in ready and state.input_fd in connections_ended(sockets.input_monitor)
        if left and state.until_s is None:
            # Its outputs came over another connection, whose end will tell that all of them are here.
            state.until_s = self.clock_s() + LAST_WORDS_S
        if state.until_s is not None and self.clock_s() >= state.until_s:
            self._end(slot, "it disconnected")

    def _end(self, slot: EngineSlot, reason: str) -> None:
        """Deliver what the engine sent before it left, then its end."""
        if slot.state.stage is Stage.GONE:
            return
        while self._read(slot, READ_BURST):
            pass
        slot.state.until_s = None
        if slot.state.stage is Stage.REGISTERED:
            self._fail(f"engine {slot.index}: {reason}")
        slot.state.end(reason)

    def _read(self, slot: EngineSlot, limit: int) -> bool:
        """Deliver up to `limit` messages; False: no more are there."""
        for _ in range(limit):
            if slot.state.stage is Stage.GONE:
                return False
            try:
                frames = slot.sockets.output.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            slot.state.output_fd = descriptor_of(frames[0])
            self._deliver(slot, frames[0].bytes)
        return True

    def _deliver(self, slot: EngineSlot, payload: bytes) -> None:
        state = slot.state
        if payload == ENGINE_DEAD:
            state.until_s = None
            self._fail(f"engine {slot.index}: it reported its own death")
            state.end("it reported its own death")
            return
        if state.codec is None:
            log.warning("engine %d: ignored an output before its registration", slot.index)
            return
        try:
            event = state.codec.decode(payload)
        except WireError as exc:
            log.warning("engine %d: dropped an output: %s", slot.index, exc)
            state.unreadable += 1
            if state.unreadable >= MAX_UNREADABLE:
                state.end(f"it sent {MAX_UNREADABLE} unreadable messages in a row")
            return
        state.unreadable = 0
        state.mailbox.deliver(event)


@attrs.frozen(kw_only=True, eq=False)
class FrontendHub:
    """The sockets of a frontend for a fixed number of engines. `close` joins the thread ``ts-hub``.

    Attributes:
        address: of the handshake socket; engines dial it.
    """

    address: str
    slots: tuple[EngineSlot, ...]
    commands: Commands
    state: HubState
    context: zmq.Context[zmq.Socket[bytes]]
    thread: threading.Thread

    def wait_for_engines(self, timeout_s: float | None = None) -> tuple[ZmqEngineLink, ...]:
        """Block until every engine has registered; links by engine index.

        Raises: PeerLost: not all came in time, one registered wrongly or left, or the hub was closed.
        """
        state = self.state
        with state.changed:
            state.changed.wait_for(
                lambda: state.registered == len(self.slots) or bool(state.failure) or state.ended, timeout_s
            )
            if state.failure:
                raise PeerLost(state.failure)
            if state.ended:
                raise PeerLost("the frontend closed while it waited for engines")
            if state.registered < len(self.slots):
                raise PeerLost(f"{state.registered} of {len(self.slots)} engines registered within {timeout_s} s")
        return tuple(
            ZmqEngineLink(index=slot.index, info=slot.state.info, commands=self.commands)
            for slot in self.slots
            if slot.state.info is not None
        )

    def close(self) -> None:
        """Disconnect from all engines; each listener gets its `EngineGone`."""
        self.commands.put(Drop(engine=None))
        self.thread.join()
        self.commands.waker.close()
        self.context.destroy(linger=0)


def bind_hub(*, engines: int, address: str = LOOPBACK) -> FrontendHub:
    """Bind the sockets for `engines` engines and start the thread.

    Args:
        address: of the handshake socket: ``tcp://host:port`` (``*``: the kernel picks), or
            ``ipc://path``, in which case the data sockets are files beside that path.
    Raises: PeerLost: the address cannot be bound.
    """
    if not 1 <= engines <= MAX_ENGINES:
        raise PeerLost(f"engines={engines}: an identity has two bytes, so 1 to {MAX_ENGINES} can be told apart")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.MAX_SOCKETS, max(1023, 8 * engines))
    try:
        handshake = context.socket(zmq.ROUTER)
        handshake.bind(address)
        slots = tuple(EngineSlot(index=i, sockets=bind_data(context, address, i)) for i in range(engines))
    except BaseException as exc:
        context.destroy(linger=0)
        if isinstance(exc, zmq.ZMQError):
            raise PeerLost(f"cannot bind the engine wire at {address}: {exc}") from exc
        raise
    commands = Commands(waker=open_waker())
    state = HubState()
    hub = HubThread(handshake=handshake, slots=slots, commands=commands, state=state)
    at = bound_at(handshake)
    thread = threading.Thread(target=hub.run, name="ts-hub", daemon=True)
    thread.start()
    return FrontendHub(address=at, slots=slots, commands=commands, state=state, context=context, thread=thread)
