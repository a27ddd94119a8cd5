"""Frames to plane values and back, for each end of the wire. Pure: no socket, no thread, no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import attrs

from tokenspeed.plane.messages import (
    AbortRequest,
    ControlReply,
    FrontendMessage,
    GenerateRequest,
    OutputBatch,
    Refusal,
)
from tokenspeed.wire.calls import decode_call, encode_call
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.layouts import LAYOUTS, REPLY, Layouts
from tokenspeed.wire.outputs import decode_output, decode_reply, encode_output, encode_reply, refused
from tokenspeed.wire.requests import decode_request, encode_request, rid_of
from tokenspeed.wire.structs import pack, unpack

ADD, ABORT, CONTROL, ENCODE = b"\x00", b"\x01", b"\x02", b"\x03"
ENGINE_DEAD = b"ENGINE_CORE_DEAD"
"""The last frame of an engine that fails: raw, not msgpack."""

Answer: TypeAlias = OutputBatch | ControlReply


@attrs.frozen(kw_only=True)
class Arrival:
    """What one input message comes to: something for the loop, an answer at once, or both."""

    message: FrontendMessage | None = None
    answer: Answer | None = None


class EngineEnd(Protocol):
    """An engine's reading and writing; both run on the wire thread (PT-9)."""

    def decode(self, frames: Sequence[bytes]) -> Arrival: ...

    def encode(self, event: Answer) -> bytes: ...


@attrs.frozen(kw_only=True)
class EngineCodec:
    """The engine's end. `layouts` is what it announces, and what its peer follows."""

    engine_index: int = 0
    layouts: Layouts = LAYOUTS

    def decode(self, frames: Sequence[bytes]) -> Arrival:
        """Frames are ``[type byte][payload][tensors…]``; tensors belong to fields that are refused.

        Raises: WireError: nobody can be answered; the frame is dropped.
        """
        if len(frames) < 2 or len(frames[0]) != 1:
            raise WireError("frame", f"{len(frames)} frames, the first of {len(frames[0]) if frames else 0} bytes")
        kind, values = frames[0], unpack(frames[1])
        if kind == ADD:
            return self._add(values)
        if kind == ABORT:
            if not isinstance(values, list) or not all(isinstance(rid, str) for rid in values):
                raise WireError("rids", "an abort is an array of request ids")
            return Arrival(message=AbortRequest(rids=tuple(values)))
        if kind == CONTROL:
            call = decode_call(values)
            return Arrival(message=call.op, answer=call.answer)
        if kind == ENCODE:
            return self._encode_refused(values)
        raise WireError("type", f"{kind.hex()} is not a message type")

    def encode(self, event: Answer) -> bytes:
        match event:
            case OutputBatch():
                return pack(encode_output(event, self.layouts, engine_index=self.engine_index))
            case ControlReply():
                return pack(encode_reply(event, self.layouts, engine_index=self.engine_index))

    def refusal(self, rid: str, status: int, message: str, field: str = "") -> OutputBatch:
        refusal = Refusal(rid=rid, status=status, message=message, field=field)
        return refused(refusal, engine_index=self.engine_index)

    def _add(self, values: object) -> Arrival:
        try:
            return Arrival(message=decode_request(values, self.layouts))
        except WireError as exc:
            rid = rid_of(values, self.layouts)
            if rid is None:
                raise
            return Arrival(answer=self.refusal(rid, 400, str(exc), exc.field))

    def _encode_refused(self, values: object) -> Arrival:
        rid = values[3] if isinstance(values, list) and len(values) > 3 else None
        if not isinstance(rid, str):
            raise WireError("request_id", "an encode request without a readable id")
        return Arrival(answer=self.refusal(rid, 400, "encode requests are not supported by this engine yet"))


@attrs.frozen(kw_only=True)
class FrontendCodec:
    """A frontend's end of the wire to one engine, in the layouts that engine announced."""

    layouts: Layouts

    def encode(self, message: FrontendMessage) -> tuple[bytes, bytes]:
        """Raises: WireError: the engine's layout has no place for a field that is set."""
        match message:
            case GenerateRequest():
                return ADD, pack(encode_request(message, self.layouts))
            case AbortRequest(rids=rids, prefixes=(), every=False):
                return ABORT, pack(rids)
            case _:
                return CONTROL, pack(encode_call(message))

    def decode(self, payload: bytes) -> Answer:
        values = unpack(payload)
        if isinstance(values, list) and values and values[0] == REPLY:
            return decode_reply(values, self.layouts)
        return decode_output(values, self.layouts)
