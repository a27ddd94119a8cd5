"""The random lives of requests, with a host tier, images, several cache groups and late acknowledgments."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from scheduler_rig import build, config, prompt
from test_scheduler_machine import CHAINS, SchedulerMachine
from toy_groups import some_groups

from tokenspeed.plane.plan import LoadBackOp, RestoreOp, SnapshotOp, WriteBackOp
from tokenspeed.plane.results import CacheAcks, HeadFacts, Rejected
from tokenspeed.scheduler.config import WritePolicy

KINDS = (WriteBackOp, LoadBackOp, SnapshotOp, RestoreOp)


class HostMachine(SchedulerMachine):
    @initialize(
        depth=st.integers(0, 1),
        page=st.sampled_from((2, 4, 4)),
        pages=st.integers(8, 13),
        seqs=st.integers(3, 5),
        budget=st.integers(4, 16),
        chunk=st.integers(2, 8),
        chain=st.sampled_from(CHAINS),
        policy=st.sampled_from(list(WritePolicy)),
        host=st.sampled_from((3, 12, 40, 40)),
        images=st.sampled_from((2, 1, 3, 0)),
        kind=st.sampled_from(("full", "full", "full", *some_groups(4))),
        delay=st.integers(0, 2),
        headroom=st.integers(0, 6),
    )
    def begin(
        self, depth, page, pages, seqs, budget, chunk, chain, policy, host, images, kind, delay, headroom
    ) -> None:
        chosen = config(
            max_num_seqs=seqs,
            max_batched_tokens=budget,
            chunk_tokens=chunk,
            page_tokens=page,
            num_pages=pages + (0 if kind == "full" else 10),
            max_model_len=40,
            overlap_schedule_depth=depth,
            retraction=chain,
            resume_headroom_tokens=headroom,
            groups=some_groups(page)[kind],
            host_parents=host,
            images=images,
            write_policy=policy,
        )
        self.rig, self.mirror = build(chosen), build(chosen)
        self.mirror.audited = False
        for rig in self.rigs:
            rig.host.delay = delay

    @rule(seed=st.integers(0, 3), copies=st.integers(2, 4), rounds=st.integers(4, 16))
    def crowd(self, seed: int, copies: int, rounds: int) -> None:
        """More long outputs than the pool holds."""
        for rig in self.rigs:
            for at in range(copies):
                request = rig.add(prompt(6 + at, seed=seed + at), max_new=14 + seed)
                if isinstance(rig.submit(request), Rejected):
                    self._forget(rig, request)
        self.rounds(rounds)

    @rule(kind=st.sampled_from(KINDS), held=st.booleans())
    def withhold(self, kind: type, held: bool) -> None:
        """Acknowledgments of one kind do not come for a while."""
        for rig in self.rigs:
            (rig.host.held.add if held else rig.host.held.discard)(kind)

    @rule(which=st.integers(0, 9))
    def acknowledge_one(self, which: int) -> None:
        """Out of order, and twice."""
        for rig in self.rigs:
            if rig.host.pending:
                acks = rig.host.end([rig.host.pending[which % len(rig.host.pending)].op.op_id])
                for _ in range(2):
                    rig.scheduler.advance_head(HeadFacts(acks=acks))

    @rule()
    def acknowledge_nothing(self) -> None:
        for rig in self.rigs:
            rig.scheduler.advance_head(HeadFacts(acks=CacheAcks(snapshots=(10**6,), restores=(10**6,))))

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for rig in self.rigs:
                rig.host.held = set()
        super().teardown()


HostMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestHostMachine = pytest.mark.contract("SP-1", "SP-16", "SP-44", "SP-53", "CT-7", "CT-9")(HostMachine.TestCase)
