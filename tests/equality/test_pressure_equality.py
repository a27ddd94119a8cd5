"""Greedy tokens of the default model in a pool too small for the load equal those without pressure.

Every way to give way is taken: images with both write policies, and recomputation, at depth 0 and 1,
on the native forward with its asynchronous streams. The ordinary run takes three of the six combinations,
the others are slow tests. What the plans asked of the device is counted, so that no run is vacuous.
"""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
from greedy_reference import differences, drive, read_prompts

from tokenspeed.compose.engine import rank_engine
from tokenspeed.plane.plan import ExecutionPlan, HistorySeed, WriteBackOp
from tokenspeed.settings.model import (
    CacheSettings,
    DeviceSettings,
    Retraction,
    SchedulerSettings,
    Settings,
    WeightsMode,
    WritePolicy,
)
from tokenspeed.testing import RecordingLink

REFERENCE = "smollm2-135m-q4_1.json"
LONGEST_PROMPT = 280
NEW_TOKENS = 40
IMAGES = (Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT)
RECOMPUTE = (Retraction.RECOMPUTE, Retraction.ABORT)

SLOW = pytest.mark.slow
RUNS = [
    pytest.param(0, WritePolicy.WRITE_THROUGH, IMAGES, id="depth 0, images, write through", marks=SLOW),
    pytest.param(1, WritePolicy.WRITE_THROUGH, IMAGES, id="depth 1, images, write through"),
    pytest.param(0, WritePolicy.WRITE_BACK, IMAGES, id="depth 0, images, write back"),
    pytest.param(1, WritePolicy.WRITE_BACK, IMAGES, id="depth 1, images, write back", marks=SLOW),
    pytest.param(0, WritePolicy.WRITE_BACK, RECOMPUTE, id="depth 0, recomputed, write back", marks=SLOW),
    pytest.param(1, WritePolicy.WRITE_THROUGH, RECOMPUTE, id="depth 1, recomputed, write through"),
]


@attrs.frozen(eq=False)
class Witness:
    """A `History` that keeps nothing and counts the cache operations of every plan with a batch."""

    seen: Counter[str] = attrs.field(factory=Counter)

    def seeds(self, plan: ExecutionPlan) -> tuple[HistorySeed, ...]:
        for op in plan.device_ops():
            ordered = isinstance(op, WriteBackOp) and op.stream_ordered
            self.seen[f"{'ordered ' if ordered else ''}{type(op).__name__}"] += 1
        self.seen["copies"] += len(plan.pages_to_copy)
        return ()


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.contract("CT-1", "CT-2", "CT-7", "SP-42")
@pytest.mark.parametrize(("depth", "policy", "chain"), RUNS)
def test_tokens_under_pressure_equal_the_reference(
    depth: int, policy: WritePolicy, chain: tuple[Retraction, ...], record_property: pytest.RecordProperty
) -> None:
    images = Retraction.SNAPSHOT in chain
    settings = Settings(
        device=DeviceSettings(kv_pool_tokens=512, weights=WeightsMode.EXACT),
        scheduler=SchedulerSettings(
            max_num_seqs=12, max_batched_tokens=256, chunk_tokens=128, overlap=depth == 1, retraction=chain
        ),
        cache=CacheSettings(host_gib=0.25, write_policy=policy, images=3 if images else 0),
    )
    wanted = [
        attrs.evolve(prompt, expected=prompt.expected[:NEW_TOKENS])
        for prompt in read_prompts(REFERENCE)
        if len(prompt.ids) <= LONGEST_PROMPT
    ]
    link, witness = RecordingLink(), Witness()
    with rank_engine(settings, connect=lambda info, wakeup: link, history=witness) as engine:
        counters = drive(engine, link, wanted, seed=depth)
        scheduler = engine.loop.scheduler
        assert scheduler.sizes().held == 0
        assert scheduler.available_lcm_blocks() == scheduler.num_usable_pages
    found, excused = differences(wanted, link)
    seen = witness.seen
    record_property("seen", dict(seen))
    assert not found
    assert excused <= 2
    assert counters.preempted > 0
    assert seen["LoadBackOp"] + seen["RestoreOp"] > 0
    assert (seen["SnapshotOp"] > 0) is images
    assert (seen["RestoreOp"] > 0) is images
    stored = "WriteBackOp" if policy is WritePolicy.WRITE_THROUGH else "ordered WriteBackOp"
    assert seen[stored] > 0
