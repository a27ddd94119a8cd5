"""Messages that nobody should send. Each is a function of a seed, so that a failure is repeated by its number.

Needs pyzmq, msgspec and numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from raw_frontend import add, pack, sampling

from tokenspeed.wire.layouts import LAYOUTS

RIDS = tuple(f"fuzz-{number}" for number in range(6))
METHODS: tuple[tuple[str, list[Any]], ...] = (
    ("pause_generation", [{"mode": "keep"}]),
    ("pause", [{"mode": "wait"}]),
    ("pause_generation", [{"mode": "abort"}]),
    ("continue_generation", []),
    ("resume", []),
    ("flush_cache", [0.0]),
    ("flush_cache", [{"timeout_s": 0.01}]),
    ("abort_request", [{"rid": RIDS[0]}]),
    ("abort_request", [{"abort_all": True}]),
    ("release_memory_occupation", [{"tags": ["kv_cache"]}]),
    ("resume_memory_occupation", [{}]),
    ("sleep", [{"level": 1}]),
    ("wake_up", [{}]),
    ("update_weights_from_disk", [{"model_path": "/nowhere"}]),
    ("update_weights_from_tensor", [{"blobs": [b"no safetensors"]}]),
    ("update_weights_from_distributed", [{"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}]),
    ("update_weight_version", [{"new_version": "v"}]),
    ("destroy_weights_update_group", [{}]),
    ("server_info", []),
    ("health", []),
    ("is_paused", []),
    ("stop_profile", []),
    ("nonsense", [1, 2]),
)
LENGTHS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
)
"""Headers of msgpack arrays, maps, strings and bytes that promise far more than follows."""


def junk(random: Random, depth: int = 3) -> Any:
    """Any msgpack value."""
    scalars: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: random.random() < 0.5,
        lambda: random.choice((-1, 0, 1, 255, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)),
        lambda: random.choice((0.0, -0.0, 1e-300, 1e308, float("nan"), float("inf"), -float("inf"))),
        lambda: random.choice(("", "\0", "ä", "x" * 5000, *RIDS)),
        lambda: random.randbytes(random.randrange(40)),
    )
    kind = random.randrange(len(scalars) + (2 if depth else 0))
    if kind < len(scalars):
        return scalars[kind]()
    count = random.randrange(5)
    if kind == len(scalars):
        return [junk(random, depth - 1) for _ in range(count)]
    return {random.choice(("rid", "mode", "", "é", 7, -1)): junk(random, depth - 1) for _ in range(count)}


def valid(random: Random) -> tuple[int, Any]:
    """A message's type and payload as a well-behaved gateway would send it."""
    kind = random.choice((0, 0, 0, 1, 2, 2, 3))
    if kind == 0:
        length = random.choice((1, 5, 17, 60, 120))
        tail = [None] * random.randrange(len(LAYOUTS.request) - 9)
        options = sampling(p0=random.choice((1, 4, 200, None)), p3=random.choice((0.0, 1.0)), p15=True)
        return 0, add(random.choice(RIDS), [random.randrange(256) for _ in range(length)], options, *tail)
    if kind == 1:
        return 1, random.sample(RIDS, random.randrange(len(RIDS)))
    if kind == 2:
        method, arguments = random.choice(METHODS)
        return 2, [random.randrange(1 << 20), method, arguments]
    return 3, ["EncodeRequest", None, None, random.choice(RIDS), "h", 1, 2, []]


def mutated(random: Random, value: Any) -> Any:
    """`value` with one thing changed, at any depth."""
    if isinstance(value, list) and value and random.random() < 0.9:
        copy = list(value)
        at = random.randrange(len(copy))
        change = random.randrange(6)
        if change == 0:
            del copy[at]
        elif change == 1:
            copy.insert(at, copy[at])
        elif change == 2:
            copy[at] = junk(random)
        elif change == 3:
            copy = copy[:at]
        else:
            copy[at] = mutated(random, copy[at])
        return copy
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        return {**value, name: mutated(random, value[name])}
    return junk(random)


def broken(random: Random, payload: bytes) -> bytes:
    """`payload` as bytes that were cut, changed or led in by a false length."""
    change = random.randrange(6)
    at = random.randrange(len(payload) + 1)
    if change == 0:
        return payload[:at]
    if change == 1:
        return payload[:at] + random.randbytes(random.randrange(1, 4)) + payload[at + 1 :]
    if change == 2:
        return random.choice(LENGTHS) + payload[at:]
    if change == 3:
        return payload[:at] + random.choice(LENGTHS) + payload[at:]
    if change == 4:
        return random.choice((b"\x91", b"\x81\xa0")) * random.choice((200, 20_000))
    return random.randbytes(random.randrange(200))


def hostile_frames(seed: int) -> list[bytes]:
    """One message to an engine: valid, nearly valid, or nothing of the kind."""
    random = Random(seed)
    kind, value = valid(random)
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        value = mutated(random, value)
    payload = pack(value)
    if random.random() < 0.3:
        payload = broken(random, payload)
    frames = [bytes([kind]), payload]
    shape = random.randrange(12)
    if shape == 0:
        frames = [random.randbytes(random.randrange(4)) for _ in range(random.randrange(1, 6))]
    elif shape == 1:
        frames = [random.choice((b"\x04", b"\xff", b"", b"\0\0")), payload]
    elif shape == 2:
        frames = frames[: random.randrange(1, 2)]
    elif shape == 3:
        frames += [random.randbytes(300)] * random.randrange(1, 20)
    elif shape == 4:
        frames = [frames[0], b"", payload]
    return frames


def hostile_output(seed: int) -> bytes:
    """One message to a frontend."""
    random = Random(seed)
    row: list[Any] = [
        "BatchTokenIDOutSlim",
        ["a"],
        [[4]],
        [random.choice(("", "stop", "?"))],
        [3],
        [1],
        [0],
        [[]],
        [[]],
    ]
    row += [0, 1, 0, 3, 31, [None], [None], *[[[]] for _ in range(6)], 20]
    value: Any = random.choice((row, ["ControlReplySlim", 3, True, "", 0], {"status": "HELLO"}))
    for _ in range(random.choice((0, 1, 2, 5))):
        value = mutated(random, value)
    payload = pack(value)
    return broken(random, payload) if random.random() < 0.4 else payload
