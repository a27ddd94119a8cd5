"""Random lives over a prefill and a decode node: transfers end late, fail on either side, or lose their request."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from remote_rig import Pair, Side, pair
from toy_groups import some_groups

from tokenspeed.plane.messages import Finish
from tokenspeed.scheduler.states import State

STEMS = tuple([(7 * at * at + 3 * seed) % 10 for at in range(20)] for seed in range(3))
SHAPES = some_groups(4)


class RemoteMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pair: Pair | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        assert self.pair is not None
        return self.pair.prefill, self.pair.decode

    @initialize(
        depth=st.integers(0, 1),
        pages=st.integers(24, 40),
        kind=st.sampled_from(sorted(SHAPES)),
        images=st.integers(0, 2),
    )
    def begin(self, depth, pages, kind, images) -> None:
        self.pair = pair(
            overlap_schedule_depth=depth,
            num_pages=pages,
            groups=SHAPES[kind],
            max_model_len=48,
            chunk_tokens=8,
            max_batched_tokens=24,
            max_num_seqs=4,
            host_parents=20 if images else 0,
            images=images,
        )

    @rule(
        stem=st.sampled_from(STEMS),
        keep=st.integers(0, 20),
        tail=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        max_new=st.integers(1, 14),
        eos_ends=st.booleans(),
    )
    def submit(self, stem, keep, tail, max_new, eos_ends) -> None:
        if len(self.sides[0].rig.by_row) < 8:
            self.pair.new(stem[:keep] + tail, max_new=max_new, eos_ends=eos_ends)

    @rule(count=st.integers(1, 4))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.pair.round()

    @rule(which=st.integers(0, 100))
    def transfer_ends(self, which: int) -> None:
        rids = [rid for rid in self.pair.ready() if self._alive(rid)]
        if rids:
            self.pair.transfer(rids[which % len(rids)])

    @rule(which=st.integers(0, 100), side=st.integers(0, 1))
    def transfer_fails(self, which: int, side: int) -> None:
        streams = sorted(self.sides[side].streams)
        if streams:
            self.sides[side].done(streams[which % len(streams)], ok=False)

    @rule(which=st.integers(0, 100), side=st.integers(0, 1))
    def abort(self, which: int, side: int) -> None:
        rig = self.sides[side].rig
        live = [request for request in rig.requests if not request.retired]
        if live:
            rig.abort(live[which % len(live)])

    @rule(forward=st.sampled_from((False, True, True)), side=st.integers(0, 1))
    @precondition(lambda self: self.pair is not None)
    def freeze_or_thaw(self, forward: bool, side: int) -> None:
        self.sides[side].rig.permit(forward=forward)

    def _alive(self, rid: str) -> bool:
        """Both nodes still want the transfer."""
        return all(
            side.rig.scheduler.life.of(side.streams[rid].row) in (State.HANDOFF, State.REMOTE_RECEIVE)
            for side in self.sides
        )

    def teardown(self) -> None:
        if self.pair is None:
            return
        for side in self.sides:
            side.rig.permit(forward=True)
        for _ in range(1500):
            if not any(side.rig.scheduler.sizes().held for side in self.sides):
                break
            self.pair.round()
            for rid in self.pair.ready():
                if self._alive(rid):
                    self.pair.transfer(rid)
            for mine, other in (self.sides, self.sides[::-1]):
                for rid in tuple(mine.streams):
                    # The other node has given up, or is about to.
                    gone = all(request.finish is not Finish.RUNNING for request in self._of(other, rid))
                    if gone and rid not in other.streams:
                        mine.done(rid, ok=False)
                    elif rid in other.streams and not self._alive(rid):
                        mine.done(rid, ok=False)
                        other.done(rid, ok=False)
        self.pair.check()

    def _of(self, side: Side, rid: str) -> list[object]:
        return [side.rig.requests[int(rid[1:])]]


RemoteMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestRemoteMachine = pytest.mark.contract("SP-54")(RemoteMachine.TestCase)
