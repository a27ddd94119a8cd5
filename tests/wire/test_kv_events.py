"""The cache-event publisher, read by independent subscribers in both encodings."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import msgspec
import pytest
import zmq
from rig import SPECS, hand_rig, request

from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import FlushCacheOp
from tokenspeed.plane.results import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from tokenspeed.wire.kv_events import EventFormat, KvEventPublisher, open_publisher, short_hash

STORED = BlockStored(
    hashes=(b"\x00" * 7 + b"\x01" + b"x" * 8, b"\x00" * 7 + b"\x02" + b"x" * 8),
    parent=b"\x00" * 7 + b"\x09" + b"x" * 8,
    token_ids=tuple(range(32)),
    block_tokens=16,
)
EVENTS: tuple[KvEvent, ...] = (STORED, BlockRemoved(hashes=STORED.hashes[:1]), AllBlocksCleared())


@attrs.frozen(eq=False)
class Peers:
    """A subscriber and a replay client, connected and heard from."""

    publisher: KvEventPublisher
    subscriber: zmq.Socket[bytes]
    replay: zmq.Socket[bytes]

    def receive(self) -> tuple[bytes, int, list[object]]:
        topic, sequence, payload = self.subscriber.recv_multipart()
        return topic, struct.unpack(">q", sequence)[0], msgspec.msgpack.decode(payload)

    def ask(self, first: int) -> list[list[bytes]]:
        """Everything the replay socket answers up to and with the end mark."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        answers = [self.replay.recv_multipart()]
        while struct.unpack(">q", answers[-1][-2])[0] != -1:
            answers.append(self.replay.recv_multipart())
        return answers


Open = Callable[..., Peers]


@pytest.fixture
def peers() -> Iterator[Open]:
    opened: list[Peers] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(**options: object) -> Peers:
        publisher = open_publisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", **options)  # type: ignore[arg-type]
        subscriber, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for sock, address in ((subscriber, publisher.endpoint), (replay, publisher.replay_endpoint)):
            sock.setsockopt(zmq.RCVTIMEO, 10_000)
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(str(address))
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        found = Peers(publisher, subscriber, replay)
        opened.append(found)
        _until_heard(found)
        return found

    yield make
    for found in opened:
        found.publisher.close()
        found.subscriber.close()
        found.replay.close()
    context.term()
    assert not any(thread.name == "ts-kv-events" for thread in threading.enumerate())


def _until_heard(found: Peers) -> None:
    """A subscription reaches a PUB socket some time after the connect: publish until it has."""
    found.subscriber.setsockopt(zmq.RCVTIMEO, 20)
    for _ in range(500):
        found.publisher.publish((AllBlocksCleared(),))
        try:
            _, last, _ = found.receive()
            break
        except zmq.Again:
            continue
    found.subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
    while last < found.publisher.state.next_sequence - 1:
        _, last, _ = found.receive()


@pytest.mark.contract("PT-12")
def test_arrays_and_maps_carry_what_their_subscribers_read(peers: Open) -> None:
    arrays = peers(event_format=EventFormat.ARRAYS, rank=0, wall_s=lambda: 12.5)
    arrays.publisher.publish(EVENTS)
    _, _, (at, events, rank) = arrays.receive()
    assert (at, rank) == (12.5, 0)
    assert events == [
        ["BlockStored", [1, 2], 9, list(range(32)), 16],
        ["BlockRemoved", [1]],
        ["AllBlocksCleared"],
    ]
    maps = peers(event_format=EventFormat.MAPS)
    maps.publisher.publish(EVENTS)
    _, _, (_, events, _) = maps.receive()
    assert [event["type"] for event in events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]  # type: ignore[index]
    stored = events[0]
    assert stored["block_hashes"] == [1, 2]  # type: ignore[index]
    assert stored["parent_block_hash"] == 9  # type: ignore[index]
    assert len(stored["token_ids"]) == len(stored["block_hashes"]) * stored["block_size"]  # type: ignore[index]


def test_topic_and_sequence_frames_come_in_order_without_gaps(peers: Open) -> None:
    found = peers(topic="kv@engine")
    first = found.publisher.state.next_sequence
    for _ in range(20):
        found.publisher.publish((AllBlocksCleared(),))
    got = [found.receive() for _ in range(20)]
    assert [sequence for _, sequence, _ in got] == list(range(first, first + 20))
    assert {topic for topic, _, _ in got} == {b"kv@engine"}


@pytest.mark.parametrize(("event_format", "frames"), [(EventFormat.ARRAYS, 3), (EventFormat.MAPS, 4)])
def test_replay_gives_back_from_a_sequence_on_and_ends_with_a_mark(
    peers: Open, event_format: EventFormat, frames: int
) -> None:
    found = peers(event_format=event_format, topic="t")
    first = found.publisher.state.next_sequence
    for _ in range(5):
        found.publisher.publish(EVENTS)
    live = [found.receive() for _ in range(5)]
    answers = found.ask(first + 2)
    assert all(len(answer) == frames for answer in answers)
    numbers = [struct.unpack(">q", answer[-2])[0] for answer in answers]
    assert numbers == [first + 2, first + 3, first + 4, -1]
    assert [msgspec.msgpack.decode(answer[-1]) for answer in answers[:-1]] == [batch for _, _, batch in live[2:]]


def test_only_the_newest_batches_are_kept_for_replay(peers: Open) -> None:
    found = peers(keep=3)
    for _ in range(10):
        found.publisher.publish((AllBlocksCleared(),))
    last = found.publisher.state.next_sequence - 1
    while found.receive()[1] < last:
        pass
    assert [struct.unpack(">q", a[-2])[0] for a in found.ask(0)] == [last - 2, last - 1, last, -1]


def test_a_batch_that_finds_the_queue_full_is_counted_and_leaves_a_gap_in_the_numbers() -> None:
    publisher = open_publisher("tcp://127.0.0.1:*", max_queued=0)
    publisher.publish((AllBlocksCleared(),))
    publisher.publish((AllBlocksCleared(),))
    assert publisher.dropped == 2
    assert publisher.state.next_sequence == 2
    publisher.close()
    publisher.close()


def test_an_address_that_is_taken_is_a_settings_error_naming_the_key() -> None:
    first = open_publisher("tcp://127.0.0.1:*")
    try:
        with pytest.raises(SettingsError, match=r"kv_events\.endpoint: cannot bind"):
            open_publisher(first.endpoint)
        with pytest.raises(SettingsError, match=r"kv_events\.replay_endpoint"):
            open_publisher("tcp://127.0.0.1:*", replay_endpoint=first.endpoint)
    finally:
        first.close()


MAP_KEYS = ("type", "block_hashes", "parent_block_hash")


def as_array(event: object) -> list[object]:
    """An event of either form: its kind, hashes and parent."""
    if isinstance(event, dict):
        return [event[key] for key in MAP_KEYS if key in event]
    assert isinstance(event, list)
    return event


@pytest.mark.contract("KM-1", "KM-2")
@pytest.mark.parametrize("event_format", list(EventFormat))
def test_a_mirror_built_from_published_batches_equals_the_schedulers_index_after_every_round(
    peers: Open, event_format: EventFormat
) -> None:
    found = peers(event_format=event_format)
    rig = hand_rig(kv_sink=found.publisher, specs=attrs.evolve(SPECS, num_pages=33))
    mirror: dict[int, int | None] = {}
    kinds = Counter[object]()
    seen = found.publisher.state.next_sequence
    for turn in range(150):
        if turn < 30:
            rig.put(request(f"r{turn}", [turn % 4 + 1] * 20 + list(range(1, 30 + turn)), max_new=20))
        if turn == 45:
            rig.put(FlushCacheOp(call_id=1, timeout_s=100.0))
        rig.loop.round()
        while seen < found.publisher.state.next_sequence:
            _, seen_now, (_, events, _) = found.receive()
            seen = seen_now + 1
            for event in map(as_array, events):  # type: ignore[call-overload]
                kinds[event[0]] += 1
                if event[0] == "BlockStored":
                    parent = event[2]
                    for block in event[1]:
                        assert parent is None or parent in mirror
                        mirror[block] = parent
                        parent = block
                elif event[0] == "BlockRemoved":
                    for block in event[1]:
                        del mirror[block]
                else:
                    mirror.clear()
        index = rig.loop.scheduler.snapshot().index  # type: ignore[attr-defined]
        assert set(mirror) == {short_hash(name) for name in index}
    assert rig.link.finish("r3")
    assert set(kinds) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert kinds["BlockRemoved"] > 5
