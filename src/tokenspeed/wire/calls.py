"""Control calls: a method's name and arguments to the engine's operation, and back (FW-16, FW-17)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from tokenspeed.plane.messages import AbortRequest, ControlOp, ControlReply, UnsupportedOp
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.operations import Body, operation_of, told

NOT_CARRIED_OUT = frozenset({"collective_rpc"})
"""Methods that are known and answered with an error by the engine itself."""

FIRST_ARGUMENT: Mapping[str, str] = MappingProxyType(
    {"flush_cache": "timeout_s", "pause": "mode", "pause_generation": "mode", "abort_request": "rid"}
)
"""What the first argument means where it is not a map."""

NO_CALL = 0
"""The id of calls whose answer nobody waits for."""


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


def encode_call(op: ControlOp | AbortRequest) -> list[object]:
    method, body = told(op)
    return [NO_CALL if isinstance(op, AbortRequest) else op.call_id, method, [body]]


def _understood(call_id: int, method: object, args: object) -> Call:
    if not isinstance(method, str):
        raise WireError("method", f"expected a name, got {type(method).__name__}")
    if not isinstance(args, list):
        raise WireError("args", f"expected an array, got {type(args).__name__}")
    if method in NOT_CARRIED_OUT:
        return Call(op=UnsupportedOp(call_id=call_id, method=method))
    op = operation_of(call_id, method, _body(method, args))
    if isinstance(op, AbortRequest):
        # The loop sends no reply to an abort: unknown ids are no fault, known ones end on their stream.
        return Call(op=op, answer=ControlReply(call_id=call_id, success=True))
    return Call(op=op)


def _body(method: str, args: list[Any]) -> Body:
    first = args[0] if args else None
    if first is None:
        return {}
    if isinstance(first, dict):
        return first
    name = FIRST_ARGUMENT.get(method)
    if name is None:
        raise WireError("args", f"{method} takes a map, got {type(first).__name__}")
    return {name: first}
