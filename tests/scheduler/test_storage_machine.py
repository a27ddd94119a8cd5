"""Random lives with a storage backend: outcomes early, late, partial, twice or never, and two schedulers that agree."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_rig import described
from toy_groups import some_groups
from toy_storage import StoredRig, stored_rig

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import StorageVerb
from tokenspeed.plane.results import HeadFacts, StorageDone, StorageTick
from tokenspeed.scheduler.config import WritePolicy
from tokenspeed.scheduler.policy import AgedPriority, Fcfs, LongestPrefixMatch

STEMS = tuple([(7 * at * at + 3 * seed) % 10 for at in range(20)] for seed in range(6))
POLICIES = {"fcfs": Fcfs(), "priority": AgedPriority(rounds_per_level=2), "lpm": LongestPrefixMatch(patience_rounds=20)}


def _choices(rig: StoredRig) -> list[int]:
    """Open operations to choose from: GETs if there are any."""
    ids = sorted(rig.executor.open)
    return [op_id for op_id in ids if rig.executor.open[op_id].verb is StorageVerb.GET] or ids


class StorageMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rigs: tuple[StoredRig, ...] = ()
        self.slow = False

    @initialize(
        depth=st.integers(0, 1),
        pages=st.integers(16, 34),
        host=st.integers(4, 30),
        images=st.integers(0, 2),
        kind=st.sampled_from(sorted(some_groups(4))),
        write=st.sampled_from(list(WritePolicy)),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def begin(self, depth, pages, host, images, kind, write, policy) -> None:
        self.rigs = tuple(
            stored_rig(
                overlap_schedule_depth=depth,
                num_pages=pages,
                host_parents=host,
                images=images,
                write_policy=write,
                groups=some_groups(4)[kind],
                max_model_len=64,
                chunk_tokens=8,
                max_batched_tokens=24,
                policy=POLICIES[policy],
            )
            for _ in range(2)
        )
        self.rigs[1].rig.audited = False
        for rig in self.rigs:
            # Storage knows the beginnings of what will be asked for, and the nearer tiers know nothing.
            for stem in STEMS:
                rig.rig.new(stem, max_new=1)
                rig.run()
            rig.settle()
            assert rig.rig.scheduler.clear_cache()
            rig.rig._drain()
            rig.served = False

    @rule(
        stem=st.sampled_from(STEMS),
        keep=st.integers(8, 20),
        tail=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        max_new=st.integers(1, 12),
        salt=st.sampled_from((b"", b"", b"salt")),
        copies=st.integers(1, 2),
    )
    def submit(self, stem, keep, tail, max_new, salt, copies) -> None:
        for rig in self.rigs:
            length = len(stem[:keep] + tail) + max_new
            room = rig.rig.scheduler.admission._parents_alone(length - 1)
            if length <= 64 and room <= rig.rig.scheduler.num_usable_pages and len(rig.rig.by_row) < 10:
                for _ in range(copies):
                    rig.rig.new(stem[:keep] + tail, max_new=max_new, salt=salt)

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        for rig in self.rigs:
            live = [request for request in rig.rig.requests if not request.retired]
            if live:
                rig.rig.abort(live[which % len(live)])

    @rule(count=st.integers(1, 5))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            for rig in self.rigs:
                for op_id in sorted(rig.executor.open):
                    if rig.executor.open[op_id].verb is not StorageVerb.GET and not self.slow:
                        rig.end(op_id)
            plans = [rig.round() for rig in self.rigs]
            assert described(plans[0]) == described(plans[1])

    @rule(which=st.integers(0, 100), fails=st.sampled_from((0, 0, 1, 2, 4, ~0)))
    def operation_ends(self, which: int, fails: int) -> None:
        """`fails`: a bit for each key."""
        for rig in self.rigs:
            ids = _choices(rig)
            if ids:
                rig.end(ids[which % len(ids)], fails=lambda at: bool(fails >> at & 1))

    @rule(which=st.integers(0, 100))
    def operation_is_given_up(self, which: int) -> None:
        for rig in self.rigs:
            ids = _choices(rig)
            if ids:
                rig.executor.cancel(ids[which % len(ids)])

    @rule()
    def nearer_tiers_forget(self) -> None:
        """All requests end, and what storage has is in no other place any more."""
        for rig in self.rigs:
            rig.forward, rig.served, rig.executor.pressure = True, True, 0.0
            rig.run(rounds=1500)
            rig.settle()
            rig.served = False
            assert rig.rig.scheduler.clear_cache()
            rig.rig._drain()

    @rule(
        odd=st.sampled_from(("freeze", "thaw", "thaw", "clear", "pressure", "calm", "late", "repeat", "slow", "quick"))
    )
    @precondition(lambda self: bool(self.rigs))
    def something_rare(self, odd: str) -> None:
        """`slow`: QUERYs and PUTs do not end by themselves."""
        if odd in ("slow", "quick"):
            self.slow = odd == "slow"
        for rig in self.rigs:
            match odd:
                case "freeze" | "thaw":
                    rig.forward = odd == "thaw"
                case "clear":
                    may = rig.rig.scheduler.can_clear_cache()
                    assert rig.rig.scheduler.clear_cache() == may
                    rig.rig._drain()
                case "pressure" | "calm":
                    rig.executor.pressure = 1.0 if odd == "pressure" else 0.0
                case "late":
                    rig.executor.now_s += 100.0
                case "repeat":
                    closed = [op for op in rig.executor.log if op.op_id not in rig.executor.open][-3:]
                    done = tuple(StorageDone(op_id=op.op_id, outcomes=(True,) * len(op.keys)) for op in closed)
                    tick = StorageTick(forward=rig.forward, storage=rig.forward, completed=done, cancelled=(999,))
                    pending = {done.op_id for done in rig.executor.completed} | set(rig.executor.cancelled)
                    if not pending & {op.op_id for op in closed}:
                        rig.rig.scheduler.advance_head(HeadFacts(tick=tick))

    def teardown(self) -> None:
        for rig in self.rigs:
            rig.forward = rig.served = True
            rig.executor.pressure = 0.0
            rig.run(rounds=1500)
            rig.rig.check_tokens()
            assert all(request.finish is not Finish.RUNNING for request in rig.rig.requests)
            rig.settle()
            assert not rig.executor.open
            rig.rig.check_idle()


StorageMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestStorageMachine = pytest.mark.contract("SP-1", "SP-16")(StorageMachine.TestCase)
