"""Operations by their names: a method and its arguments to a value of `plane.operations`, and back.

The names are those of SGLang's and vLLM's routes. Both roads use this one reading: control calls of a
foreign frontend, and the HTTP server's own routes.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

from tokenspeed.plane.messages import AbortRequest, ControlOp, FlushCacheOp, PauseMode, PauseOp, ResumeOp
from tokenspeed.plane.operations import (
    MEMORY_TAGS,
    AskOp,
    CloseGroupOp,
    DiskWeights,
    GroupWeights,
    OpenGroupOp,
    Question,
    ReleaseMemoryOp,
    ResumeMemoryOp,
    StartProfileOp,
    StopProfileOp,
    TensorWeights,
    UpdateWeightsOp,
    WeightsGroup,
    WeightVersionOp,
)
from tokenspeed.wire.faults import WireError

Body: TypeAlias = Mapping[str, Any]

DEFAULT_GROUP = "weight_update_group"
PAUSE_MODES: Mapping[str, PauseMode] = MappingProxyType(
    {**{mode.value: mode for mode in PauseMode}, "in_place": PauseMode.KEEP}
)
UNRECORDED = ("with_stack", "record_shapes", "profile_by_stage", "profile_memory")


def operation_of(call_id: int, method: str, body: Body) -> ControlOp | AbortRequest:
    """What `method` asks for. Fields that are not known are ignored.

    Raises: WireError: no such method, or an argument that is not allowed; names it.
    """
    read = _READERS.get(method)
    if read is None:
        raise WireError("method", f"{method!r:.80} is not an operation of this engine")
    return read(call_id, body)


def told(op: ControlOp | AbortRequest) -> tuple[str, Body]:
    """The method and the arguments that `operation_of` reads as an equal operation."""
    match op:
        case PauseOp(mode=mode):
            return "pause_generation", {"mode": mode.value}
        case ResumeOp():
            return "continue_generation", {}
        case FlushCacheOp(timeout_s=timeout_s):
            return "flush_cache", {"timeout_s": timeout_s}
        case AbortRequest(rids=rids, prefixes=prefixes, every=every):
            return "abort_request", {"rids": list(rids), "prefixes": list(prefixes), "abort_all": every}
        case ReleaseMemoryOp(tags=tags, restore=restore):
            return "release_memory_occupation", {"tags": list(tags), "restore": restore}
        case ResumeMemoryOp(tags=tags):
            return "resume_memory_occupation", {"tags": list(tags)}
        case UpdateWeightsOp():
            return _told_update(op)
        case WeightVersionOp(version=version, abort=abort):
            return "update_weight_version", {"new_version": version, "abort_all_requests": abort}
        case OpenGroupOp(group=group):
            host, _, port = group.address.rpartition(":")
            return "init_weights_update_group", {
                "master_address": host,
                "master_port": int(port),
                "rank_offset": group.rank,
                "world_size": group.size,
                "group_name": group.name,
                "backend": group.backend,
                "timeout_s": group.timeout_s,
            }
        case CloseGroupOp(name=name):
            return "destroy_weights_update_group", {"group_name": name}
        case AskOp(question=question):
            return question.value, {}
        case StartProfileOp(path=path, steps=steps, skip=skip, wants=wants):
            return "start_profile", {
                "output_dir": path,
                "num_steps": steps,
                "start_step": skip,
                "activities": list(wants),
            }
        case StopProfileOp():
            return "stop_profile", {}
        case other:
            return other.method, {}


def _told_update(op: UpdateWeightsOp) -> tuple[str, Body]:
    common = {"weight_version": op.version, "abort_all_requests": op.abort}
    match op.source:
        case DiskWeights(path=path):
            return "update_weights_from_disk", {"model_path": path, **common}
        case TensorWeights(blobs=blobs):
            return "update_weights_from_tensor", {
                "serialized_named_tensors": list(blobs),
                "load_format": "safetensors",
                **common,
            }
        case GroupWeights(group=group, names=names, dtypes=dtypes, shapes=shapes):
            return "update_weights_from_distributed", {
                "group_name": group,
                "names": list(names),
                "dtypes": list(dtypes),
                "shapes": [list(shape) for shape in shapes],
                **common,
            }


# ---- methods ----------------------------------------------------------------------------------


def _pause(call_id: int, body: Body) -> PauseOp:
    said = body.get("mode")
    if said is None:
        return PauseOp(call_id=call_id, mode=PauseMode.ABORT)
    if not isinstance(said, str) or said not in PAUSE_MODES:
        raise WireError("mode", f"{said!r:.40} is not one of {', '.join(PAUSE_MODES)}")
    return PauseOp(call_id=call_id, mode=PAUSE_MODES[said])


def _flush(call_id: int, body: Body) -> FlushCacheOp:
    name = "timeout" if "timeout" in body else "timeout_s"
    return FlushCacheOp(call_id=call_id, timeout_s=_number(body, name, 0.0))


def _abort(call_id: int, body: Body) -> AbortRequest:
    """A request with several choices is known to the engine as ``RID-0``, ``RID-1``, …"""
    del call_id
    every = _flag(body, "abort_all")
    first = body.get("rid", body.get("rids"))
    rids = [first] if isinstance(first, str) else [] if first is None else first
    prefixes = body.get("prefixes", [])
    if not _strings(rids) or not _strings(prefixes) or "" in rids or not (rids or prefixes or every):
        raise WireError("rid", "expected a request id or an array of them, or abort_all")
    return AbortRequest(rids=tuple(rids), prefixes=tuple(prefixes) or tuple(f"{rid}-" for rid in rids), every=every)


def _release(call_id: int, body: Body) -> ReleaseMemoryOp:
    return ReleaseMemoryOp(call_id=call_id, tags=_tags(body) or MEMORY_TAGS, restore=_flag(body, "restore", True))


def _sleep(call_id: int, body: Body) -> ReleaseMemoryOp:
    """Level 1 brings the weights back at the end, level 2 forgets them."""
    level = body.get("level", 1)
    if level not in (1, 2) or isinstance(level, bool):
        raise WireError("level", f"{level!r:.40} is not 1 or 2")
    return ReleaseMemoryOp(call_id=call_id, tags=_tags(body) or MEMORY_TAGS, restore=level == 1)


def _wake(call_id: int, body: Body) -> ResumeMemoryOp:
    return ResumeMemoryOp(call_id=call_id, tags=_tags(body))


def _from_disk(call_id: int, body: Body) -> UpdateWeightsOp:
    return _update(call_id, body, DiskWeights(path=_text(body, "model_path" if "model_path" in body else "path")))


def _from_tensor(call_id: int, body: Body) -> UpdateWeightsOp:
    if body.get("load_format") != "safetensors":
        raise WireError(
            "load_format",
            f"{body.get('load_format')!r:.40} is not safetensors: pickled tensors would run code of the sender's",
        )
    blobs = body.get("serialized_named_tensors")
    if not isinstance(blobs, list) or not blobs:
        raise WireError("serialized_named_tensors", "expected an array of safetensors files, as bytes or base64")
    return _update(call_id, body, TensorWeights(blobs=tuple(_blob(at, blob) for at, blob in enumerate(blobs))))


def _from_group(call_id: int, body: Body) -> UpdateWeightsOp:
    names, dtypes, shapes = body.get("names"), body.get("dtypes"), body.get("shapes")
    if not _strings(names) or not names or not _strings(dtypes) or not isinstance(shapes, list):
        raise WireError("names", "expected names, dtypes and shapes, arrays of equal length")
    if not len(names) == len(dtypes) == len(shapes):
        raise WireError("names", f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; expected as many")
    for at, shape in enumerate(shapes):
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise WireError(f"shapes[{at}]", f"{shape!r:.40} is not an array of sizes")
    source = GroupWeights(
        group=_text(body, "group_name", DEFAULT_GROUP),
        names=tuple(names),
        dtypes=tuple(dtype.removeprefix("torch.") for dtype in dtypes),
        shapes=tuple(tuple(shape) for shape in shapes),
    )
    return _update(call_id, body, source)


def _update(call_id: int, body: Body, source: DiskWeights | TensorWeights | GroupWeights) -> UpdateWeightsOp:
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise WireError("weight_version", f"{version!r:.40} is not a string")
    return UpdateWeightsOp(call_id=call_id, source=source, version=version, abort=_flag(body, "abort_all_requests"))


def _version(call_id: int, body: Body) -> WeightVersionOp:
    return WeightVersionOp(call_id=call_id, version=_text(body, "new_version"), abort=_flag(body, "abort_all_requests"))


def _open_group(call_id: int, body: Body) -> OpenGroupOp:
    group = WeightsGroup(
        name=_text(body, "group_name", DEFAULT_GROUP),
        address=f"{_text(body, 'master_address')}:{_whole(body, 'master_port', 1, 65535)}",
        rank=_whole(body, "rank_offset", 1, 1 << 16),
        size=_whole(body, "world_size", 2, 1 << 16),
        backend=_text(body, "backend", "gloo"),
        timeout_s=_number(body, "timeout_s", 60.0),
    )
    if group.rank >= group.size:
        raise WireError("rank_offset", f"{group.rank} is not below world_size {group.size}")
    return OpenGroupOp(call_id=call_id, group=group)


def _close_group(call_id: int, body: Body) -> CloseGroupOp:
    return CloseGroupOp(call_id=call_id, name=_text(body, "group_name", DEFAULT_GROUP))


def _start_profile(call_id: int, body: Body) -> StartProfileOp:
    """What is asked for beyond activities is refused by the engine like them (KM-46)."""
    activities = body.get("activities")
    wants = ["CPU"] if activities is None else activities
    if not _strings(wants):
        raise WireError("activities", f"{activities!r:.40} is not an array of names")
    wants = [*wants, *(name for name in UNRECORDED if body.get(name))]
    steps = body.get("num_steps")
    return StartProfileOp(
        call_id=call_id,
        path=_text(body, "output_dir", "profiles"),
        steps=None if steps is None else _whole(body, "num_steps", 1, 1 << 30),
        skip=0 if body.get("start_step") is None else _whole(body, "start_step", 0, 1 << 30),
        wants=tuple(wants),
    )


def _stop_profile(call_id: int, body: Body) -> StopProfileOp:
    del body
    return StopProfileOp(call_id=call_id)


def _resume(call_id: int, body: Body) -> ResumeOp:
    del body
    return ResumeOp(call_id=call_id)


def _question(question: Question) -> Callable[[int, Body], AskOp]:
    return lambda call_id, _body: AskOp(call_id=call_id, question=question)


_READERS: Mapping[str, Callable[[int, Body], ControlOp | AbortRequest]] = MappingProxyType(
    {
        **dict.fromkeys(("pause_generation", "pause"), _pause),
        **dict.fromkeys(("continue_generation", "resume"), _resume),
        **dict.fromkeys(("flush_cache", "reset_prefix_cache"), _flush),
        **dict.fromkeys(("abort_request", "abort"), _abort),
        "release_memory_occupation": _release,
        "sleep": _sleep,
        **dict.fromkeys(("resume_memory_occupation", "wake_up"), _wake),
        "update_weights_from_disk": _from_disk,
        "update_weights_from_tensor": _from_tensor,
        "update_weights_from_distributed": _from_group,
        "update_weight_version": _version,
        "init_weights_update_group": _open_group,
        "destroy_weights_update_group": _close_group,
        "start_profile": _start_profile,
        "stop_profile": _stop_profile,
        **{question.value: _question(question) for question in Question},
    }
)


# ---- arguments --------------------------------------------------------------------------------


def _strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _text(body: Body, name: str, default: str | None = None) -> str:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not value:
        raise WireError(name, f"{value!r:.40} is not a string with something in it")
    return value


def _number(body: Body, name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise WireError(name, f"{value!r:.40} is not a number of seconds, 0 or more")
    return float(value)


def _whole(body: Body, name: str, least: int, most: int) -> int:
    value = body.get(name)
    if type(value) is not int or not least <= value <= most:
        raise WireError(name, f"{value!r:.40} is not an integer from {least} to {most}")
    return value


def _flag(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise WireError(name, f"{value!r:.40} is not true or false")
    return value


def _tags(body: Body) -> tuple[str, ...]:
    said = body.get("tags")
    if said is None:
        return ()
    if not _strings(said) or not set(said) <= set(MEMORY_TAGS):
        raise WireError("tags", f"{said!r:.60} is not an array of {', '.join(MEMORY_TAGS)}")
    return tuple(dict.fromkeys(said))


def _blob(at: int, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError) as exc:
        raise WireError(f"serialized_named_tensors[{at}]", f"not base64: {exc}") from exc
