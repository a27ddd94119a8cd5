"""Recordings of the device's work: started and stopped on demand, or over a number of forwards."""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import ControlReply
from tokenspeed.plane.operations import ProfileOp, StartProfileOp
from tokenspeed.plane.ports import DataPlane

RECORDED = ("CPU",)
"""What this build records; anything else is refused, never left out in silence (KM-46)."""


@attrs.define(eq=False)
class ProfileState:
    """Writer: Profiling.

    Attributes:
        asked: the recording that runs, or waits for its first forward.
        skip, steps: forwards until it begins, and from there to its end.
        file: of the recording that runs; "": none runs.
        last: of the one that ended by itself and was not asked for yet.
    """

    asked: StartProfileOp | None = None
    skip: int = 0
    steps: int | None = None
    file: str = ""
    last: str = ""


@attrs.frozen(kw_only=True, eq=False)
class Profiling:
    """Counts dispatched forwards, so that a recording of n steps holds exactly n forwards at any depth."""

    state: ProfileState = attrs.field(factory=ProfileState)

    def serve(self, ops: tuple[ProfileOp, ...], plane: DataPlane) -> tuple[ControlReply, ...]:
        return tuple([self._serve(op, plane) for op in ops]) if ops else ()

    def note(self, plane: DataPlane, *, forwarded: bool) -> None:
        """After each dispatch."""
        state = self.state
        if state.asked is None or not forwarded:
            return
        if not state.file:
            state.skip -= 1
            if state.skip <= 0:
                self._begin(state.asked, plane)
        elif state.steps is not None:
            state.steps -= 1
            if state.steps <= 0:
                state.last = self._end(plane)

    def _serve(self, op: ProfileOp, plane: DataPlane) -> ControlReply:
        state = self.state
        if not isinstance(op, StartProfileOp):
            file = self._end(plane) or state.last
            state.last = ""
            text = file or "stop_profile: nothing is being recorded, or it could not be written; the log has the reason"
            return ControlReply(call_id=op.call_id, success=bool(file), message=text)
        lacking = [name for name in op.wants if name not in RECORDED]
        if lacking:
            text = f"start_profile: {', '.join(lacking)} cannot be recorded here; expected only {', '.join(RECORDED)}"
            return ControlReply(call_id=op.call_id, success=False, message=text)
        if state.asked is not None:
            text = f"start_profile: already recording to {state.file or state.asked.path}; stop it first"
            return ControlReply(call_id=op.call_id, success=False, message=text)
        state.last, state.skip = "", op.skip
        if op.skip:
            state.asked = op
            return ControlReply(call_id=op.call_id, success=True, message=op.path)
        if not self._begin(op, plane):
            text = f"start_profile: {op.path} cannot be written; the log has the reason"
            return ControlReply(call_id=op.call_id, success=False, message=text)
        return ControlReply(call_id=op.call_id, success=True, message=state.file)

    def _begin(self, op: StartProfileOp, plane: DataPlane) -> bool:
        state = self.state
        state.file = plane.start_profile(op.path)
        state.asked, state.steps = (op, op.steps) if state.file else (None, None)
        return bool(state.file)

    def _end(self, plane: DataPlane) -> str:
        state = self.state
        running, state.asked, state.file, state.steps = bool(state.file), None, "", None
        return plane.stop_profile() if running else ""
