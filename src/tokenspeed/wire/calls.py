"""Control calls: a method's name and arguments to the engine's operation, and back (FW-16, FW-17)."""

from __future__ import annotations

import math
from typing import Any

import attrs

from tokenspeed.plane.messages import (
    AbortRequest,
    ControlOp,
    ControlReply,
    FlushCacheOp,
    PauseMode,
    PauseOp,
    ResumeOp,
    UnsupportedOp,
)
from tokenspeed.wire.faults import WireError

NOT_CARRIED_OUT = frozenset(
    {
        "sleep",
        "wake_up",
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "update_weight_version",
        "collective_rpc",
        "server_info",
        "health",
        "start_profile",
        "stop_profile",
    }
)
"""Methods that are known and answered with an error by the engine itself."""

_PAUSE = ("pause_generation", "pause")
_RESUME = ("continue_generation", "resume")


@attrs.frozen(kw_only=True)
class Call:
    """What a control call means: an operation for the loop, an answer at once, or both."""

    op: ControlOp | AbortRequest | None = None
    answer: ControlReply | None = None


def decode_call(values: object) -> Call:
    """An unknown method or a faulty argument becomes an answer, so that no call stays open (FW-19).

    Raises: WireError: not even the call id can be read.
    """
    if not isinstance(values, list) or not values or type(values[0]) is not int:
        raise WireError("call_id", "a control call is an array [call_id, method, args] with an integer call_id")
    call_id = values[0]
    method = values[1] if len(values) > 1 else None
    args = values[2] if len(values) > 2 else []
    try:
        return _understood(call_id, method, args)
    except WireError as exc:
        return Call(answer=ControlReply(call_id=call_id, success=False, message=str(exc)))


def encode_call(op: ControlOp) -> list[object]:
    match op:
        case PauseOp(call_id=call_id, mode=mode):
            return [call_id, _PAUSE[0], [{"mode": mode.value}]]
        case ResumeOp(call_id=call_id):
            return [call_id, _RESUME[0], []]
        case FlushCacheOp(call_id=call_id, timeout_s=timeout_s):
            return [call_id, "flush_cache", [timeout_s]]
        case UnsupportedOp(call_id=call_id, method=method):
            return [call_id, method, []]


def _understood(call_id: int, method: object, args: object) -> Call:
    if not isinstance(method, str):
        raise WireError("method", f"expected a name, got {type(method).__name__}")
    if not isinstance(args, list):
        raise WireError("args", f"expected an array, got {type(args).__name__}")
    if method in _PAUSE:
        return Call(op=PauseOp(call_id=call_id, mode=_mode(args)))
    if method in _RESUME:
        return Call(op=ResumeOp(call_id=call_id))
    if method == "flush_cache":
        return Call(op=FlushCacheOp(call_id=call_id, timeout_s=_timeout(args)))
    if method == "abort_request":
        rids = _rids(args)
        # The loop sends no reply to an abort: unknown ids are no fault, known ones end on their stream.
        return Call(op=AbortRequest(rids=rids), answer=ControlReply(call_id=call_id, success=True))
    if method in NOT_CARRIED_OUT:
        return Call(op=UnsupportedOp(call_id=call_id, method=method))
    raise WireError("method", f"{method!r:.80} is not an operation of this engine")


def _argument(args: list[Any], name: str) -> Any:
    """The first argument, or that entry of it if it is a map; None if absent."""
    first = args[0] if args else None
    return first.get(name) if isinstance(first, dict) else first


def _mode(args: list[Any]) -> PauseMode:
    said = _argument(args, "mode")
    if said is None:
        return PauseMode.ABORT
    for mode in PauseMode:
        if said == mode.value:
            return mode
    raise WireError("mode", f"{said!r:.40} is not one of {', '.join(mode.value for mode in PauseMode)}")


def _timeout(args: list[Any]) -> float:
    said = _argument(args, "timeout_s")
    if said is None:
        return 0.0
    if type(said) not in (int, float) or not math.isfinite(said) or said < 0:
        raise WireError("timeout_s", f"{said!r:.40} is not a number of seconds, 0 or more")
    return float(said)


def _rids(args: list[Any]) -> tuple[str, ...]:
    first = args[0] if args else None
    if isinstance(first, dict):
        first = first.get("rid", first.get("rids"))
    rids = [first] if isinstance(first, str) else first
    if not isinstance(rids, list) or not rids or not all(isinstance(rid, str) for rid in rids):
        raise WireError("rid", "expected a request id or an array of them")
    return tuple(rids)
