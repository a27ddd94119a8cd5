"""The other node of a prefill/decode pair, played by the toy model itself; it reads and writes as late as it may."""

from __future__ import annotations

import attrs
from scheduler_rig import Rig
from toy_groups import GARBAGE, columns, is_stop

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import ExecutionPlan, GroupBlocks, RemoteStream
from tokenspeed.plane.results import TransferDone
from tokenspeed.scheduler.config import Role


@attrs.frozen(eq=False)
class Transfer:
    stream: RemoteStream
    since: int


@attrs.define(eq=False)
class ToyPeer:
    """Attributes:
    delay: rounds from a stream's plan to its end.
    held: transfers do not end by themselves.
    open: by row.
    """

    rig: Rig
    delay: int = 1
    held: bool = False
    open: dict[int, Transfer] = attrs.field(factory=dict)

    @property
    def receives(self) -> bool:
        return self.rig.config.role is Role.DECODE

    def note(self, plan: ExecutionPlan) -> None:
        """Position 5 of a plan; the toy device has done its batch by then, which touches none of these blocks."""
        assert not (plan.remote_decode if self.receives else plan.remote_prefill)
        for stream in (*plan.remote_prefill, *plan.remote_decode):
            assert stream.row not in self.open
            assert self.rig.table.identity.rid[stream.row] == stream.rid
            assert self.rig.table.schedule.slot[stream.row] == stream.slot
            self.open[stream.row] = Transfer(stream, self.rig.rounds)
            if self.receives:
                self._fill(stream, garbage=True)
            else:
                self._compare(stream)

    def due(self) -> list[int]:
        """Rows whose transfer ends now."""
        if self.held:
            return []
        return [row for row, transfer in self.open.items() if self.rig.rounds - transfer.since >= self.delay]

    def end(self, row: int, *, ok: bool) -> None:
        stream = self.open.pop(row).stream
        request = self.rig.by_row[row]
        if not self.receives:
            self._compare(stream)
            if ok and request.finish is Finish.RUNNING:
                assert len(request.out) == 1
                self.rig._finish(request, Finish.LENGTH)
        elif ok:
            self._fill(stream, garbage=False)
            if request.finish is Finish.RUNNING:
                self._commit(row, stream.slot)
        finished = request.finish is not Finish.RUNNING
        self.rig.scheduler.advance([TransferDone(row=row, ok=ok, finished=finished)])

    def _commit(self, row: int, slot: int) -> None:
        """The bootstrap token, which comes with the KV."""
        request, tokens = self.rig.by_row[row], self.rig.table.tokens
        token, known = self.rig.wanted(request)[0], int(tokens.known[row])
        tokens.seated[slot, known] = token
        tokens.known[row] = known + 1
        request.out.append(token)
        if request.eos_ends and is_stop(token):
            self.rig._finish(request, Finish.STOP)
        elif len(request.out) == request.max_new:
            self.rig._finish(request, Finish.LENGTH)

    def _fill(self, stream: RemoteStream, *, garbage: bool) -> None:
        """Positions from `stream.start` on."""
        request, device = self.rig.by_row[stream.row], self.rig.device
        wanted = columns(request.prompt, self.rig.config.specs, request.taste)
        for part in stream.pages:
            column = [GARBAGE] * len(request.prompt) if garbage else wanted[part.group]
            spec = self.rig.config.specs[part.group]
            # What no query will see again the other node has given up.
            seen = len(request.prompt) - spec.window_tokens + 1 if spec.kind == "window" else 0
            for block, first in self._places(part, len(request.prompt)):
                if first + spec.block_tokens <= seen:
                    continue
                values = device.read(part.group, block)
                for at in range(len(values)):
                    if stream.start <= first + at < len(column):
                        values[at] = column[first + at]
                device.write(part.group, block, values)

    def _compare(self, stream: RemoteStream) -> None:
        """What the other node reads is what it needs."""
        request, device = self.rig.by_row[stream.row], self.rig.device
        wanted = columns(request.prompt, self.rig.config.specs, request.taste)
        for part in stream.pages:
            column = wanted[part.group]
            for block, first in self._places(part, len(request.prompt)):
                values = device.read(part.group, block)
                want = column[first : first + len(values)]
                assert values[: len(want)] == want, "a block was written over while it was sent"

    def _places(self, part: GroupBlocks, tokens: int) -> list[tuple[int, int]]:
        """Blocks, each with the position of its first number; a table ends with the prompt."""
        spec = self.rig.config.specs[part.group]
        if spec.kind == "state":
            return [(block, tokens - 1) for block in part.blocks]
        first = -(-tokens // spec.block_tokens) - len(part.blocks)
        return [(block, (first + at) * spec.block_tokens) for at, block in enumerate(part.blocks)]
