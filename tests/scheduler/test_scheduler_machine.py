"""Random lives of requests over the real scheduler, with everything checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_rig import Request, Rig, build, config, described

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.results import Accepted, CacheAcks, HeadFacts, Rejected
from tokenspeed.scheduler.config import Retraction
from tokenspeed.scheduler.policy import AgedPriority, Fcfs

STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5], [1] * 20)
CHAINS = (
    (Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT),
    (Retraction.SNAPSHOT, Retraction.ABORT),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Two rigs get the same trace: what holds for one scheduler holds for its mirror (SP-1)."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig
        self.mirror: Rig
        self.frozen = False

    @initialize(
        depth=st.integers(0, 1),
        page=st.integers(2, 5),
        pages=st.integers(7, 16),
        seqs=st.integers(2, 5),
        budget=st.integers(3, 16),
        chunk=st.integers(1, 8),
        prefix=st.sampled_from((True, True, True, False)),
        chain=st.sampled_from(CHAINS[:1] * 3 + CHAINS[1:]),
        zero=st.booleans(),
        aged=st.booleans(),
        headroom=st.integers(0, 6),
    )
    def begin(self, depth, page, pages, seqs, budget, chunk, prefix, chain, zero, aged, headroom) -> None:
        chosen = config(
            max_num_seqs=seqs,
            max_batched_tokens=budget,
            chunk_tokens=chunk,
            page_tokens=page,
            num_pages=pages,
            max_model_len=40,
            overlap_schedule_depth=depth,
            prefix=prefix,
            retraction=chain,
            zero_new_blocks=zero,
            resume_headroom_tokens=headroom,
        )
        policy = AgedPriority(rounds_per_level=2, patience_rounds=30) if aged else Fcfs()
        self.rig, self.mirror = build(chosen, policy=policy), build(chosen, policy=policy)
        self.mirror.audited = False

    @property
    def rigs(self) -> tuple[Rig, Rig]:
        return self.rig, self.mirror

    @rule(
        stem=st.sampled_from(STEMS),
        keep=st.integers(0, 20),
        tail=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        max_new=st.integers(1, 18),
        eos_ends=st.sampled_from((True, False, False)),
        salt=st.sampled_from((b"", b"", b"", b"salt")),
        priority=st.integers(-2, 2),
        prompt_from=st.sampled_from((-1, -1, -1, -1, 0, 3)),
        copies=st.integers(1, 3),
    )
    def submit(self, stem, keep, tail, max_new, eos_ends, salt, priority, prompt_from, copies) -> None:
        outcomes = []
        for rig in self.rigs:
            batch = [
                rig.add(
                    stem[:keep] + tail,
                    max_new=max_new,
                    eos_ends=eos_ends,
                    salt=salt,
                    priority=priority,
                    prompt_from=prompt_from,
                )
                for _ in range(copies)
            ]
            held = rig.scheduler.sizes().held
            outcome = rig.submit(*batch)
            outcomes.append(outcome)
            if isinstance(outcome, Rejected):
                assert rig.scheduler.sizes().held == held
                for request in batch:
                    self._forget(rig, request)
            else:
                assert outcome == Accepted(count=copies)
                assert rig.scheduler.sizes().held == held + copies
        assert outcomes[0] == outcomes[1]

    def _forget(self, rig: Rig, request: Request) -> None:
        rig.table.free(request.row)
        del rig.by_row[request.row]
        rig.requests.remove(request)

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        for rig in self.rigs:
            live = [request for request in rig.requests if not request.retired]
            if live:
                rig.abort(live[which % len(live)])

    @rule(count=st.integers(1, 6))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            plans = [rig.round() for rig in self.rigs]
            assert described(plans[0]) == described(plans[1])
            if self.frozen:
                assert plans[0].batch is None

    @rule()
    def many_rounds(self) -> None:
        self.rounds(8)

    @rule()
    def plan_without_landing(self) -> None:
        """A slow device: the loop is a forward ahead, and stays so for a moment; only at depth 1."""
        if self.rig.depth and len(self.rig.queue) < 2:
            plans = [rig.plan() for rig in self.rigs]
            assert described(plans[0]) == described(plans[1])

    @rule(odd=st.sampled_from(("clear", "freeze", "thaw", "ack")))
    def something_rare(self, odd: str) -> None:
        for rig in self.rigs:
            match odd:
                case "clear":
                    may = rig.scheduler.can_clear_cache()
                    assert rig.scheduler.clear_cache() == may
                    if may:
                        assert rig.scheduler.empty_lcm_blocks() == rig.scheduler.num_usable_pages
                    rig.land(down_to=len(rig.queue))
                case "freeze" | "thaw":
                    rig.permit(forward=odd == "thaw")
                case "ack":
                    for _ in range(2):
                        rig.scheduler.advance_head(HeadFacts(acks=CacheAcks(write_backs=(1,), restores=(2,))))
        if odd in ("freeze", "thaw"):
            self.frozen = odd == "freeze"

    @precondition(lambda self: hasattr(self, "rig"))
    @invariant()
    def streams_are_right(self) -> None:
        self.rig.check_tokens()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for rig in self.rigs:
            rig.permit(forward=True)
            rig.run(rounds=3000)
            rig.check_tokens()
            for request in rig.requests:
                assert request.finish is not Finish.RUNNING
                assert request.decodes <= request.max_new - 1
                if request.finish is not Finish.ABORT and request.prompt_from >= 0:
                    assert set(range(max(0, request.prompt_from - 1), len(request.prompt))) <= request.computed
            rig.check_idle()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerMachine = pytest.mark.contract("SP-1", "SP-52", "SP-53", "KM-2", "IS-20")(SchedulerMachine.TestCase)
