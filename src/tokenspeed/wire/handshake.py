"""What is said before requests flow: HELLO, INIT, READY, and the registration (FW-7..11).

All of these are msgpack maps with string keys; a key that is not known is ignored.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, TypeVar

import attrs
import msgspec

from tokenspeed.plane.messages import EngineInfo, KvEventFeed, SamplingParams
from tokenspeed.version import __version__
from tokenspeed.wire.faults import WireError, from_validation
from tokenspeed.wire.layouts import Layouts, layouts_of
from tokenspeed.wire.structs import pack, typed, unpack

MAX_ENGINES = 1 << 16

S = TypeVar("S", bound=msgspec.Struct)


class _Addresses(msgspec.Struct):
    inputs: list[str]
    outputs: list[str]


class _Init(msgspec.Struct):
    addresses: _Addresses


class _Greeting(msgspec.Struct):
    status: Literal["HELLO", "READY"]


class _Registration(msgspec.Struct, kw_only=True):
    """What a frontend reads of a registration. The defaults suit an engine that does not tell."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int | None = None
    prefix_granularity: int | None = None
    dtype: Literal["float16", "bfloat16", "float32"]
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int = 1
    max_num_batched_tokens: int = -1
    instance_id: str = ""
    kv_cache_size_tokens: int | None = None
    request_types: tuple[str, ...] = ("add", "abort")
    positional_layouts: dict[str, list[str]] | None = None
    disaggregation_mode: str | None = None
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    model: str = ""
    vocab_size: int = (1 << 31) - 1
    max_waiting: int = (1 << 31) - 1
    max_logprobs: int = 0
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, Any] = {}


@attrs.frozen(kw_only=True)
class DataAddresses:
    """Where the frontend has bound the data sockets; engines connect to them."""

    input: str
    output: str


@attrs.frozen(kw_only=True)
class Registered:
    """A decoded registration: what the engine serves, and the field orders it speaks."""

    info: EngineInfo
    layouts: Layouts


def identity_of(engine_index: int) -> bytes:
    """The socket identity of an engine: its index, two bytes little-endian."""
    return struct.pack("<H", engine_index)


def encode_greeting(status: Literal["HELLO", "READY"], info: EngineInfo) -> bytes:
    return pack(
        {
            "status": status,
            "local": True,
            "headless": True,
            "parallel_config_hash": None,
            "engine_count": info.engine_count,
        }
    )


def decode_greeting(payload: bytes) -> str:
    """ "HELLO" or "READY". Raises: WireError."""
    return _from_map(payload, _Greeting, "greeting").status


def encode_init(addresses: DataAddresses) -> bytes:
    return pack(
        {
            "addresses": {
                "inputs": [addresses.input],
                "outputs": [addresses.output],
                "coordinator_input": None,
                "coordinator_output": None,
                "frontend_stats_publish_address": None,
            },
            "parallel_config": {},
        }
    )


def decode_init(payload: bytes) -> DataAddresses:
    """Raises: WireError."""
    addresses = _from_map(payload, _Init, "INIT").addresses
    if not addresses.inputs or not addresses.outputs:
        raise WireError("INIT.addresses", "names no input or no output address")
    return DataAddresses(input=addresses.inputs[0], output=addresses.outputs[0])


def encode_registration(info: EngineInfo, layouts: Layouts) -> bytes:
    """The first frame on the input socket.

    `block_size` and not its younger alias: a frontend that knows both refuses a map with both.
    """
    return pack(
        {
            "max_model_len": info.max_model_len,
            "num_gpu_blocks": info.num_blocks,
            "block_size": info.block_size,
            "dtype": info.dtype,
            "vllm_version": f"tokenspeed {__version__}",
            "dp_stats_address": None,
            "world_size": 1,
            "data_parallel_size": info.engine_count,
            "data_parallel_rank": info.engine_index,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_batched_tokens,
            "instance_id": info.instance_id,
            "kv_cache_size_tokens": info.kv_capacity_tokens or info.num_blocks * info.block_size,
            "kv_cache_max_concurrency": None,
            "kv_events_config": None if info.kv_events is None else _feed(info.kv_events),
            "request_types": info.request_types,
            "positional_layouts": layouts.announced(),
            "disaggregation_mode": info.role,
            "model_type": info.model_type,
            "architectures": info.architectures,
            "model": info.model,
            "vocab_size": info.vocab_size,
            "max_waiting": info.max_waiting,
            "max_logprobs": info.max_logprobs,
            "eos_token_ids": info.eos_token_ids,
            "sampling_defaults": attrs.asdict(info.defaults),
        }
    )


def decode_registration(payload: bytes) -> Registered:
    """Raises: WireError: names the key that is missing, of a wrong type or out of its range."""
    got = _from_map(payload, _Registration, "registration")
    block_size = got.block_size or got.prefix_granularity
    if not block_size:
        raise WireError("registration.block_size", "missing")
    info = EngineInfo(
        model=got.model,
        dtype=got.dtype,
        vocab_size=got.vocab_size,
        max_model_len=got.max_model_len,
        num_blocks=got.num_gpu_blocks,
        block_size=block_size,
        max_num_seqs=got.max_num_seqs,
        max_batched_tokens=got.max_num_batched_tokens,
        max_waiting=got.max_waiting,
        max_logprobs=got.max_logprobs,
        eos_token_ids=got.eos_token_ids,
        request_types=got.request_types,
        engine_index=got.data_parallel_rank,
        engine_count=got.data_parallel_size,
        role=got.disaggregation_mode or "null",
        architectures=got.architectures,
        model_type=got.model_type,
        instance_id=got.instance_id,
        kv_capacity_tokens=got.kv_cache_size_tokens or 0,
        defaults=_defaults(got.sampling_defaults),
    )
    return Registered(info=info, layouts=layouts_of(got.positional_layouts))


def _feed(feed: KvEventFeed) -> dict[str, object]:
    """All of these keys, or a frontend that knows the map refuses it."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": feed.endpoint,
        "replay_endpoint": feed.replay_endpoint,
        "buffer_steps": feed.keep_batches,
        "hwm": feed.high_water,
        "max_queue_size": feed.max_queued,
        "topic": feed.topic,
    }


def _from_map(payload: bytes, kind: type[S], what: str) -> S:
    values = unpack(payload)
    if not isinstance(values, dict):
        raise WireError(what, f"expected a map, got {type(values).__name__}")
    return typed(values, kind, what)


def _defaults(told: dict[str, Any]) -> SamplingParams:
    """Sampling defaults by name; a default this build does not know cannot be applied and is left out."""
    known = {field.name for field in attrs.fields(SamplingParams)}
    try:
        return msgspec.convert({name: told[name] for name in known & told.keys()}, SamplingParams)
    except msgspec.ValidationError as exc:
        raise from_validation("registration.sampling_defaults", exc) from exc
