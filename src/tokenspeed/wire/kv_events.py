"""Publication of cache events on a ZeroMQ PUB socket, with a replay socket for what a subscriber missed.

Each message is ``[topic][sequence, 8 bytes big-endian][batch]``; a batch is the msgpack array
``[time, events, rank]``. Two encodings of an event are spoken, since subscribers of one cannot read
the other: arrays that begin with the event's name, and maps with the key ``type``.

Replay: a client sends the first sequence number it wants, 8 bytes big-endian, to the ROUTER socket;
it gets each batch that is still kept, one message each, then an end mark with sequence -1. In the
map encoding the topic stands in front of the sequence, as its subscribers expect.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import msgspec
import zmq

from tokenspeed.errors import SettingsError
from tokenspeed.plane.results import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from tokenspeed.wire.waker import Waker, open_waker

log = logging.getLogger(__name__)

THREAD_NAME = "ts-kv-events"
LINGER_MS = 500
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Encoded: TypeAlias = "list[object] | dict[str, object]"


class EventFormat(enum.Enum):
    """Which subscribers can read the events."""

    ARRAYS = "arrays"
    MAPS = "maps"


def short_hash(block_hash: bytes) -> int:
    """A block's 64-bit name for subscribers: the first eight bytes of its hash, big-endian."""
    return int.from_bytes(block_hash[:8], "big")


def as_array(event: KvEvent) -> Encoded:
    match event:
        case BlockStored():
            parent = None if event.parent is None else short_hash(event.parent)
            hashes = [short_hash(block) for block in event.hashes]
            return ["BlockStored", hashes, parent, event.token_ids, event.block_tokens]
        case BlockRemoved():
            return ["BlockRemoved", [short_hash(block) for block in event.hashes]]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def as_map(event: KvEvent) -> Encoded:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": [short_hash(block) for block in event.hashes],
                "parent_block_hash": None if event.parent is None else short_hash(event.parent),
                "token_ids": event.token_ids,
                "block_size": event.block_tokens,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
                **({"group_idx": event.group} if event.group else {}),
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": [short_hash(block) for block in event.hashes],
                "medium": "CPU",
                **({"group_idx": event.group} if event.group else {}),
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


ENCODERS: Mapping[EventFormat, Callable[[KvEvent], Encoded]] = {EventFormat.ARRAYS: as_array, EventFormat.MAPS: as_map}


@attrs.frozen
class Batch:
    """One round's events with the number they are published under."""

    sequence: int
    at_s: float
    events: tuple[KvEvent, ...]


@attrs.define(eq=False)
class PublisherState:
    """Writers: the control thread for `next_sequence`, `queue` (append) and `dropped`; the thread for the rest.

    `kept` are encoded batches for replay, oldest first.
    """

    next_sequence: int = 0
    dropped: int = 0
    queue: deque[Batch] = attrs.field(factory=deque[Batch])
    kept: deque[tuple[int, bytes]] = attrs.field(factory=deque["tuple[int, bytes]"])
    closing: bool = False
    thread: threading.Thread | None = None


@attrs.frozen(kw_only=True, eq=False)
class KvEventPublisher:
    """`plane.ports.KvEventSink` over ZeroMQ. Open with `open_publisher`; `close` joins its thread.

    A batch that finds the queue full is dropped and counted; its sequence number is used up, so that
    a subscriber sees the gap.

    Attributes:
        max_queued: batches that may wait for the thread.
        keep: batches a subscriber can ask for again.
    """

    topic: bytes
    rank: int
    format: EventFormat
    max_queued: int
    keep: int
    publish_socket: zmq.Socket[bytes]
    replay_socket: zmq.Socket[bytes] | None
    waker: Waker
    wall_s: Callable[[], float]
    state: PublisherState = attrs.field(factory=PublisherState)

    @property
    def endpoint(self) -> str:
        """Where subscribers connect, with the port the kernel picked."""
        return self.publish_socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        return None if self.replay_socket is None else self.replay_socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def dropped(self) -> int:
        return self.state.dropped

    @property
    def high_water(self) -> int:
        """Messages that may wait for one slow subscriber."""
        return int(self.publish_socket.getsockopt(zmq.SNDHWM))

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        state = self.state
        sequence, state.next_sequence = state.next_sequence, state.next_sequence + 1
        if len(state.queue) >= self.max_queued:
            state.dropped += 1
            return
        state.queue.append(Batch(sequence, self.wall_s(), events))
        self.waker.wake()

    def close(self) -> None:
        """Send what is queued, then end the thread and the sockets; a second call does nothing."""
        self.state.closing = True
        self.waker.wake()
        if self.state.thread is not None:
            self.state.thread.join()

    def run(self) -> None:
        """The thread's work: blocked until there is something to send or to replay."""
        poller = zmq.Poller()
        poller.register(self.waker.fileno(), zmq.POLLIN)
        if self.replay_socket is not None:
            poller.register(self.replay_socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self.waker.fileno() in ready:
                    self.waker.drain()
                # Read before the queue: what was queued before the close is still sent.
                closing = self.state.closing
                self._send_queued()
                if self.replay_socket is not None and self.replay_socket in ready:
                    self._replay(self.replay_socket)
                if closing:
                    return
        finally:
            self.publish_socket.close(LINGER_MS)
            if self.replay_socket is not None:
                self.replay_socket.close(LINGER_MS)
            self.waker.close()

    def _send_queued(self) -> None:
        state, encode = self.state, ENCODERS[self.format]
        while state.queue:
            batch = state.queue.popleft()
            payload = msgspec.msgpack.encode([batch.at_s, [encode(event) for event in batch.events], self.rank])
            state.kept.append((batch.sequence, payload))
            if len(state.kept) > self.keep:
                state.kept.popleft()
            self.publish_socket.send_multipart((self.topic, batch.sequence.to_bytes(8, "big"), payload))

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer one request. REQ and DEALER clients both put an empty frame between identity and number."""
        frames = socket.recv_multipart()
        identity, number = frames[0], frames[-1]
        if len(number) != 8:
            log.warning("KV event replay: a request of %d bytes, expected a sequence number of 8", len(number))
            return
        first = int.from_bytes(number, "big")
        middle: tuple[bytes, ...] = (self.topic,) if self.format is EventFormat.MAPS else ()
        with contextlib.suppress(zmq.ZMQError):  # the client left in the middle
            for sequence, payload in self.state.kept:
                if sequence >= first:
                    socket.send_multipart((identity, b"", *middle, sequence.to_bytes(8, "big"), payload))
            socket.send_multipart((identity, b"", *((b"",) if middle else ()), END_OF_REPLAY, b""))


def open_publisher(
    endpoint: str,
    *,
    replay_endpoint: str | None = None,
    topic: str = "",
    event_format: EventFormat = EventFormat.MAPS,
    rank: int = 0,
    max_queued: int = 10_000,
    keep: int = 10_000,
    wall_s: Callable[[], float] = time.time,
) -> KvEventPublisher:
    """Bind the sockets and start the thread ``ts-kv-events``.

    Args:
        endpoint: tcp or ipc address to bind; with a numeric tcp port, rank r takes port + r.
    Raises: SettingsError: an address cannot be bound.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    publish_socket = context.socket(zmq.PUB)
    replay_socket: zmq.Socket[bytes] | None = None
    try:
        _bind(publish_socket, "kv_events.endpoint", _of_rank(endpoint, rank))
        if replay_endpoint is not None:
            replay_socket = context.socket(zmq.ROUTER)
            _bind(replay_socket, "kv_events.replay_endpoint", _of_rank(replay_endpoint, rank))
    except SettingsError:
        publish_socket.close(0)
        if replay_socket is not None:
            replay_socket.close(0)
        raise
    publisher = KvEventPublisher(
        topic=topic.encode(),
        rank=rank,
        format=event_format,
        max_queued=max_queued,
        keep=keep,
        publish_socket=publish_socket,
        replay_socket=replay_socket,
        waker=open_waker(),
        wall_s=wall_s,
    )
    publisher.state.thread = threading.Thread(target=publisher.run, name=THREAD_NAME, daemon=True)
    publisher.state.thread.start()
    return publisher


def _of_rank(endpoint: str, rank: int) -> str:
    head, colon, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if colon and port.isdigit() and int(port) else endpoint


def _bind(socket: zmq.Socket[bytes], key: str, address: str) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    try:
        socket.bind(address)
    except zmq.ZMQError as exc:
        raise SettingsError(f"{key}: cannot bind {address}: {exc}") from exc
