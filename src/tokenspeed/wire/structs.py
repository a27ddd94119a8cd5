"""From an array in an announced order to a typed struct, and back.

An array is first paired with the names of its layout, then checked by name; so one set of types
serves every order, and a fault is told with the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from tokenspeed.plane.messages import Int32Array
from tokenspeed.wire.faults import WireError, from_validation

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
TokenIds = list[Int32]

SLICE = 4096
"""Token ids converted at a time: about a tenth of a millisecond."""

S = TypeVar("S", bound=msgspec.Struct)

_DECODER = msgspec.msgpack.Decoder()
_ENCODER = msgspec.msgpack.Encoder()


class SamplingStruct(msgspec.Struct, kw_only=True):
    """The fields of sampling_params that this build acts on or refuses; nil in any means its default."""

    max_new_tokens: int | None = None
    stop: Any = None
    stop_token_ids: TokenIds = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    thinking_budget: Any = None
    custom_params: Any = None
    logit_bias: dict[str | int, float] = {}
    seed: int | None = None
    n: int = 1
    stop_strs: Any = None
    is_normalized: bool = True


class OwnParams(msgspec.Struct, kw_only=True):
    """What our frontend puts into ``custom_params``."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    processors: tuple[tuple[str, str], ...] = ()


class RequestStruct(msgspec.Struct, kw_only=True):
    """The fields of a request that this build acts on or refuses."""

    rid: str
    input_ids: Any  # checked and converted apart, see `token_array`
    sampling_params: SamplingStruct
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Any = None
    stream: bool = False
    input_embeds: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool = False
    created_time: float = 0.0
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    input_multi_ids: Any = None
    input_extra_infos: Any = None
    multimodal_inputs: Any = None
    cache_salt: bytes = b""
    priority: int = 0
    kind: str = "generate"
    unsupported: list[str] = []
    trace: str = ""


class IdsStruct(msgspec.Struct, kw_only=True):
    input_ids: TokenIds


class OutputStruct(msgspec.Struct, kw_only=True):
    """The columns of an output batch; an appended column that is absent is empty."""

    rids: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    output_token_logprobs_idx: list[list[int]]
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 0
    finished_status_codes: list[int | None] = []
    finished_messages: list[str | None] = []
    output_top_logprobs_val: list[list[list[float]]] = []
    output_top_logprobs_idx: list[list[list[int]]] = []
    input_token_logprobs_val: list[list[float | None]] = []
    input_token_logprobs_idx: list[list[int]] = []
    input_top_logprobs_val: list[list[list[float]]] = []
    input_top_logprobs_idx: list[list[list[int]]] = []
    kv_resident_pages: int = 0
    weight_version: str = ""


class ReplyStruct(msgspec.Struct, kw_only=True):
    call_id: int
    success: bool
    message: str = ""


def unpack(payload: bytes) -> Any:
    """Any msgpack value. Raises: WireError: not msgpack."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError) as exc:
        raise WireError("payload", f"not msgpack ({exc})") from exc


def pack(value: object) -> bytes:
    return _ENCODER.encode(value)


def named(values: object, layout: Sequence[str], struct: str) -> dict[str, Any]:
    """Pair an array's elements with their names; nil elements are left to their defaults.

    Missing trailing elements are absent, elements beyond the layout are ignored.
    """
    if not isinstance(values, list):
        raise WireError(struct, f"expected an array, got {type(values).__name__}")
    return {name: value for name, value in zip(layout, values, strict=False) if value is not None}


def untagged(values: object, tag: str) -> list[Any]:
    """The elements behind the class-name tag."""
    if not isinstance(values, list) or not values:
        raise WireError(tag, f"expected an array that begins with {tag!r}")
    if values[0] != tag:
        raise WireError(tag, f"the array begins with {values[0]!r:.60}")
    return values[1:]


def typed(values: Mapping[str, Any], kind: type[S], struct: str) -> S:
    """Check named values. Raises: WireError: names the field and what it must be."""
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise from_validation(struct, exc) from exc


def token_array(ids: object, struct: str) -> Int32Array:
    """A request's ids as a read-only int32 array, a slice at a time.

    A long prompt as one call would keep the interpreter from the round for milliseconds: between slices
    another thread gets its turn. Raises: WireError: names the entry that is no int32.
    """
    if not isinstance(ids, list):
        raise WireError("input_ids", f"expected an array, got {type(ids).__name__}")
    array = np.empty(len(ids), dtype=np.int32)
    for at in range(0, len(ids), SLICE):
        part = ids[at : at + SLICE]
        try:
            msgspec.convert(part, TokenIds)
        except msgspec.ValidationError:
            typed({"input_ids": ids}, IdsStruct, struct)  # the same fault, with its place in the whole
        array[at : at + len(part)] = np.fromiter(part, np.int32, len(part))
    array.setflags(write=False)
    return array


def laid_out(values: Mapping[str, object], layout: Sequence[str]) -> list[object]:
    """Values in the order of the layout; nil where a name is not ours."""
    return [values.get(name) for name in layout]
