"""A frontend and an engine written from the wire's description alone: pyzmq and msgspec, none of our codec."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenspeed.control.wakeup import ThreadWakeup

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode
WAIT_MS = 5000

NORMALISED = {3: 1.0, 4: 1.0, 5: 1 << 30, 9: 1.0, 16: True, 17: True, 25: 1, 26: [], 28: True}
ZEROES = {6: 0.0, 7: 0.0, 8: 0.0, 10: 0, 15: False, 18: False, 27: 0}
SAMPLING: list[Any] = [{**NORMALISED, **ZEROES}.get(at) for at in range(29)]


def add(rid: str, ids: list[int], sampling: list[Any] | None = None, *tail: Any) -> list[Any]:
    """A request as a gateway sends it: 11 elements, or more with `tail`."""
    head = ["TokenizedGenerateReqInput", rid, None, None, ids, sampling or SAMPLING, False, -1, 0, None, True]
    return [*head, *tail]


def sampling(**changes: Any) -> list[Any]:
    """The 29 elements, changed at the positions named ``p3=…``."""
    values = list(SAMPLING)
    for name, value in changes.items():
        values[int(name[1:])] = value
    return values


def receive(link: Any, signal: ThreadWakeup, count: int = 1) -> list[Any]:
    """At least `count` messages from an engine's link."""
    got = list(link.receive())
    while len(got) < count:
        assert signal.wait(5.0), f"{len(got)} of {count} messages came: {got}"
        got += link.receive()
    return got


class RawFrontend:
    """Binds the three sockets before any engine exists."""

    def __init__(self, context: zmq.Context, *, engines: int = 1) -> None:
        self.engines = engines
        self.handshake = self._bind(context, zmq.ROUTER)
        self.input = self._bind(context, zmq.ROUTER)
        self.output = self._bind(context, zmq.PULL)
        self.monitor = self.input.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.registrations: dict[bytes, dict[str, Any]] = {}
        self.greetings: list[tuple[bytes, dict[str, Any]]] = []

    @staticmethod
    def _bind(context: zmq.Context, kind: int) -> zmq.Socket:
        socket = context.socket(kind)
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        return socket

    @staticmethod
    def at(socket: zmq.Socket) -> str:
        return socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    def greet(self) -> None:
        """HELLO, INIT, READY and the registration of every engine."""
        for _ in range(2 * self.engines):
            assert self.handshake.poll(WAIT_MS), f"after {self.greetings}"
            frames = self.handshake.recv_multipart()
            assert len(frames) == 2
            greeting = unpack(frames[1])
            self.greetings.append((frames[0], greeting))
            if greeting["status"] == "HELLO":
                addresses: dict[str, Any] = {"inputs": [self.at(self.input)], "outputs": [self.at(self.output)]}
                for key in ("coordinator_input", "coordinator_output", "frontend_stats_publish_address"):
                    addresses[key] = None
                self.handshake.send_multipart([frames[0], pack({"addresses": addresses, "parallel_config": {}})])
        for _ in range(self.engines):
            assert self.input.poll(WAIT_MS), "no registration"
            identity, payload = self.input.recv_multipart()
            self.registrations[identity] = unpack(payload)

    def send(self, kind: int, value: Any, *, index: int = 0, aux: tuple[bytes, ...] = ()) -> None:
        self.send_raw([bytes([kind]), pack(value), *aux], index=index)

    def send_raw(self, frames: list[bytes], *, index: int = 0) -> None:
        self.input.send_multipart([struct.pack("<H", index), *frames])

    def next_output(self) -> Any:
        assert self.output.poll(WAIT_MS), "no output"
        frame = self.output.recv_multipart()[0]
        return frame if frame == b"ENGINE_CORE_DEAD" else unpack(frame)

    def engine_left(self) -> bool:
        while self.monitor.poll(WAIT_MS):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_DISCONNECTED:
                return True
        return False

    def close(self) -> None:
        if self.input.closed:
            return
        self.input.disable_monitor()
        for socket in (self.monitor, self.handshake, self.input, self.output):
            socket.close(0)


REGISTRATION = {
    "max_model_len": 512,
    "num_gpu_blocks": 8,
    "block_size": 16,
    "dtype": "float32",
    "vllm_version": "raw",
    "world_size": 1,
    "data_parallel_size": 1,
}


class RawEngine:
    """Dials a frontend like a minimal engine of the older kind."""

    def __init__(self, context: zmq.Context, handshake: str, *, index: int = 0) -> None:
        self.context = context
        self.identity = struct.pack("<H", index)
        self.greeter = self._dealer(handshake)
        self.input: zmq.Socket | None = None
        self.output: zmq.Socket | None = None

    def _dealer(self, address: str) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.identity = self.identity
        socket.connect(address)
        return socket

    def hello(self, payload: bytes = pack({"status": "HELLO"})) -> None:
        self.greeter.send(payload)

    def init(self, timeout_ms: int = WAIT_MS) -> dict[str, Any] | None:
        return unpack(self.greeter.recv_multipart()[-1]) if self.greeter.poll(timeout_ms) else None

    def register(self, registration: bytes | None = None) -> tuple[str, str]:
        """Returns the input and the output address it was told."""
        self.hello()
        init = self.init()
        assert init is not None
        self.greeter.send(pack({"status": "READY"}))
        self.input = self._dealer(init["addresses"]["inputs"][0])
        self.input.send(registration if registration is not None else pack(REGISTRATION))
        self.output = self.context.socket(zmq.PUSH)
        self.output.linger = 1000
        self.output.connect(init["addresses"]["outputs"][0])
        return init["addresses"]["inputs"][0], init["addresses"]["outputs"][0]

    def next_input(self) -> list[bytes]:
        assert self.input is not None
        assert self.input.poll(WAIT_MS), "no input"
        return self.input.recv_multipart()

    def send(self, value: Any) -> None:
        assert self.output is not None
        self.output.send(value if isinstance(value, bytes) else pack(value))

    def close(self) -> None:
        for socket in (self.greeter, self.input, self.output):
            if socket is not None:
                socket.close()
