"""A prefill and a decode scheduler with toy devices, and a peer between them that is driven by hand."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from scheduler_rig import Request, Rig, build
from toy_groups import is_stop

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import ExecutionPlan, RemoteStream
from tokenspeed.plane.results import TransferDone
from tokenspeed.scheduler.config import Role


@attrs.define(eq=False)
class Side:
    """One node: its rig, and the streams its plans have asked for, by request id."""

    rig: Rig
    streams: dict[str, RemoteStream] = attrs.field(factory=dict)

    def round(self) -> ExecutionPlan:
        plan = self.rig.round()
        self.note(plan)
        return plan

    def note(self, plan: ExecutionPlan) -> None:
        for stream in (*plan.remote_prefill, *plan.remote_decode):
            assert stream.rid not in self.streams
            assert self.rig.table.identity.rid[stream.row] == stream.rid
            assert self.rig.table.schedule.slot[stream.row] == stream.slot
            self.streams[stream.rid] = stream

    def done(self, rid: str, *, ok: bool = True, finished: bool = False) -> None:
        """The transfer has ended, whatever the other side says."""
        stream = self.streams.pop(rid)
        self.rig.scheduler.advance([TransferDone(row=stream.row, ok=ok, finished=finished)])
        self.rig.audit()


@attrs.define(eq=False)
class Pair:
    prefill: Side
    decode: Side

    def new(self, prompt: Sequence[int], *, max_new: int = 6, eos_ends: bool = False) -> tuple[Request, Request]:
        # The prefill node's output must not end a request by itself: its first token is the other node's.
        return (
            self.prefill.rig.new(prompt, max_new=max_new + 1, eos_ends=False),
            self.decode.rig.new(prompt, max_new=max_new, eos_ends=eos_ends),
        )

    def round(self) -> None:
        self.prefill.round()
        self.decode.round()

    def ready(self) -> list[str]:
        """Requests both of whose sides have a stream open."""
        return [rid for rid in self.prefill.streams if rid in self.decode.streams]

    def transfer(self, rid: str) -> None:
        """The KV and the first token go over, and both sides hear of it."""
        source, target = self.prefill.streams[rid], self.decode.streams[rid]
        giver, taker = self.prefill.rig, self.decode.rig
        for ours, theirs in zip(source.pages, target.pages, strict=True):
            # Both tables end with the prompt.
            for block, landing in zip(reversed(ours.blocks), reversed(theirs.blocks), strict=False):
                taker.device.write(theirs.group, landing, giver.device.read(ours.group, block))
        first = giver.by_row[source.row]
        (token,) = first.out
        giver._finish(first, Finish.LENGTH)
        self.prefill.done(rid)
        request = taker.by_row[target.row]
        known = int(taker.table.tokens.known[target.row])
        if request.finish is Finish.RUNNING:
            taker.table.tokens.seated[target.slot, known] = token
            taker.table.tokens.known[target.row] = known + 1
            request.out.append(token)
            if request.eos_ends and is_stop(token):
                taker._finish(request, Finish.STOP)
            elif len(request.out) == request.max_new:
                taker._finish(request, Finish.LENGTH)
        self.decode.done(rid, finished=request.finish is not Finish.RUNNING)

    def run(self, *, rounds: int = 400) -> None:
        """Rounds and transfers until neither side holds anything."""
        for _ in range(rounds):
            if not any(side.rig.scheduler.sizes().held for side in (self.prefill, self.decode)):
                return
            self.round()
            for rid in self.ready():
                self.transfer(rid)
        raise AssertionError("not done")

    def check(self) -> None:
        """Tokens are the toy model's, and neither side has anything left."""
        self.decode.rig.check_tokens()
        for side in (self.prefill, self.decode):
            assert not side.streams
            side.rig.round()
            side.rig.check_idle()


def pair(**changes: object) -> Pair:
    return Pair(prefill=Side(build(role=Role.PREFILL, **changes)), decode=Side(build(role=Role.DECODE, **changes)))
