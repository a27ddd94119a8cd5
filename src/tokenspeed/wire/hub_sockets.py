"""The sockets of a frontend for one engine, and what tells its connection from others."""

from __future__ import annotations

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenspeed.wire.handshake import DataAddresses


@attrs.frozen(kw_only=True, eq=False)
class EngineSockets:
    """One engine's data sockets, bound, with a monitor each."""

    input: zmq.Socket[bytes]
    input_monitor: zmq.Socket[bytes]
    output: zmq.Socket[bytes]
    output_monitor: zmq.Socket[bytes]

    @property
    def all(self) -> tuple[zmq.Socket[bytes], ...]:
        return (self.input, self.input_monitor, self.output, self.output_monitor)

    def addresses(self) -> DataAddresses:
        return DataAddresses(input=bound_at(self.input), output=bound_at(self.output))

    def close(self) -> None:
        if self.input.closed:
            return
        self.input.disable_monitor()
        self.output.disable_monitor()
        for socket in self.all:
            socket.close(linger=0)


def bind_data(context: zmq.Context[zmq.Socket[bytes]], address: str, index: int) -> EngineSockets:
    inward = context.socket(zmq.ROUTER)
    # An engine always reads its input; a limit here would make the socket drop requests in silence.
    inward.setsockopt(zmq.SNDHWM, 0)
    outward = context.socket(zmq.PULL)
    sockets = EngineSockets(
        input=inward,
        input_monitor=inward.get_monitor_socket(zmq.EVENT_DISCONNECTED),
        output=outward,
        output_monitor=outward.get_monitor_socket(zmq.EVENT_DISCONNECTED),
    )
    inward.bind(_data_address(address, f"in-{index}"))
    outward.bind(_data_address(address, f"out-{index}"))
    return sockets


def _data_address(handshake: str, suffix: str) -> str:
    if handshake.startswith("ipc://"):
        return f"{handshake}-{suffix}"
    return f"{handshake.rpartition(':')[0]}:*"


def bound_at(socket: zmq.Socket[bytes]) -> str:
    at = socket.getsockopt(zmq.LAST_ENDPOINT)
    return at.decode().rstrip("\0") if isinstance(at, bytes) else str(at)


def descriptor_of(frame: zmq.Frame) -> int:
    """The descriptor of the connection that the frame came over; the monitor's events name the same one."""
    fd = frame.get(zmq.SRCFD)
    return fd if isinstance(fd, int) else -1


def connections_ended(monitor: zmq.Socket[bytes]) -> set[int]:
    """Descriptors of connections that ended since the last call."""
    ended: set[int] = set()
    while monitor.poll(0):
        ended.add(int(recv_monitor_message(monitor)["value"]))
    return ended
