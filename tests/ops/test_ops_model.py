"""Random lives of an engine under operations, against a small model of what each client must see.

Actions are requests, aborts, disconnects, pauses, resumes, releases, flushes, weight updates and rounds, in
any order. The model knows which weights each request may have been computed with: those in force when it
was let in, since an update waits until nothing runs. At the end everything is resumed and what is owed is
compared: a request that was not ended early has exactly the tokens of a fresh engine on those weights, one
that was has a beginning of them, every end came once, and no block stays held.
"""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ops_rig import HandRank, greedy, hand_rank, oracle, tiny_settings

from tokenspeed.plane.messages import AbortRequest, Finish, FlushCacheOp, PauseMode, PauseOp, ResumeOp
from tokenspeed.plane.operations import (
    DiskWeights,
    ReleaseMemoryOp,
    ResumeMemoryOp,
    UpdateWeightsOp,
    WeightVersionOp,
)

MAX_NEW = 10
PROMPTS = [list(range(1, 40)), list(range(1, 33)), list(range(1, 36)), [7, 8, 9], list(range(100, 150))]
WEIGHTS = {"v1": "random:tiny-llama@1", "v2": "random:tiny-llama@2"}

ACTIONS = (
    *("request", "request", "rounds", "rounds", "rounds", "abort", "abort_all", "gone", "pause", "resume"),
    *("release", "wake", "flush", "update", "update_abort", "bad_update", "rename"),
)


@pytest.fixture(scope="module")
def tokens() -> dict[str, list[list[int]]]:
    """Greedy tokens by version and prompt, each from a fresh engine, alone and uncached."""
    return {version: oracle(source, PROMPTS, MAX_NEW) for version, source in WEIGHTS.items()}


@attrs.define(eq=False)
class Expected:
    """The reference: each request's prompt, and the requests that something may have ended early."""

    prompts: dict[str, int] = attrs.field(factory=dict[str, int])
    cancelled: set[str] = attrs.field(factory=set[str])


@attrs.define(eq=False)
class Life:
    """One engine's life: acts, then settles all accounts."""

    rank: HandRank
    draw: random.Random
    seen: Expected = attrs.field(factory=Expected)

    def act(self) -> None:
        action = self.draw.choice(ACTIONS)
        getattr(self, f"do_{action}")()
        self.rank.rounds(self.draw.randint(0, 2))

    def do_request(self) -> None:
        number, at = len(self.seen.prompts), self.draw.randrange(len(PROMPTS))
        rid = f"r{number}"
        self.seen.prompts[rid] = at
        self.rank.put(greedy(rid, PROMPTS[at], MAX_NEW))

    def do_rounds(self) -> None:
        self.rank.rounds(self.draw.randint(1, 6))

    def do_abort(self) -> None:
        if self.seen.prompts:
            rid = self.draw.choice(sorted(self.seen.prompts))
            self.seen.cancelled.add(rid)
            self.rank.put(AbortRequest(rids=(rid,)))

    do_gone = do_abort  # a client that disconnects is an abort by id

    def do_abort_all(self) -> None:
        self.seen.cancelled.update(self.seen.prompts)
        self.rank.put(AbortRequest(every=True))

    def do_pause(self) -> None:
        mode = self.draw.choice(list(PauseMode))
        if mode is PauseMode.ABORT:
            self.seen.cancelled.update(self.seen.prompts)
        self.rank.start(PauseOp, mode=mode)

    def do_resume(self) -> None:
        self.rank.start(ResumeOp)

    def do_release(self) -> None:
        tags = self.draw.choice((("weights",), ("kv_cache",), ("weights", "kv_cache")))
        self.rank.start(ReleaseMemoryOp, tags=tags)

    def do_wake(self) -> None:
        self.rank.start(ResumeMemoryOp, tags=self.draw.choice(((), ("weights",), ("kv_cache",))))

    def do_flush(self) -> None:
        self.rank.start(FlushCacheOp)

    def do_update(self, *, abort: bool = False) -> None:
        version = self.draw.choice(sorted(WEIGHTS))
        if abort:
            self.seen.cancelled.update(self.seen.prompts)
        self.rank.start(UpdateWeightsOp, source=DiskWeights(path=WEIGHTS[version]), version=version, abort=abort)

    def do_update_abort(self) -> None:
        self.do_update(abort=True)

    def do_bad_update(self) -> None:
        self.rank.start(UpdateWeightsOp, source=DiskWeights(path="/no/such/weights"), version="never")

    def do_rename(self) -> None:
        """Only to the name it has, and not behind an update: a version means its weights here."""
        state = self.rank.engine.loop.control_ops.state
        if not state.queue and not any(isinstance(sent, UpdateWeightsOp) for sent in self.rank.link.inbox):
            self.rank.start(WeightVersionOp, version=state.version)

    def settle(self) -> None:
        self.rank.call(ResumeOp)
        self.rank.call(ResumeMemoryOp)
        self.rank.settle()
        self.rank.call(ResumeMemoryOp)
        self.rank.settle()

    def check(self, tokens: dict[str, list[list[int]]]) -> None:
        link, calls = self.rank.link, self.rank.calls
        assert sorted(reply.call_id for reply in link.replies) == list(range(1, calls + 1)), "each call, once"
        for rid, at in self.seen.prompts.items():
            got, end = link.tokens(rid), link.finish(rid)
            versions = self.rank.versions(rid)
            assert len(versions) <= 1, (rid, versions)
            assert "never" not in versions
            assert end is not None, rid
            whole = tokens[versions.pop()][at] if versions else []
            if end[0] == Finish.LENGTH:
                assert got == whole, rid
            else:
                assert rid in self.seen.cancelled or end[1] == 429, (rid, end)
                assert got == whole[: len(got)], rid
        loop = self.rank.engine.loop
        assert loop.scheduler.sizes().held == 0
        assert loop.scheduler.active_lcm_blocks() == 0
        assert not loop.control_ops.state.held


def live(seed: int, *, overlap: bool, steps: int, tokens: dict[str, list[list[int]]]) -> None:
    chosen = tiny_settings(overlap=overlap, pool_tokens=256)
    chosen = attrs.evolve(chosen, model=attrs.evolve(chosen.model, source=WEIGHTS["v1"]))
    with hand_rank(chosen) as rank:
        life = Life(rank=rank, draw=random.Random(seed))
        for _ in range(steps):
            life.act()
        life.settle()
        life.check({**tokens, "default": tokens["v1"]})


@pytest.mark.contract("CP-1", "CP-2", "CP-3", "CP-4", "CP-7", "CP-10", "CP-11", "CP-12")
@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("seed", range(4))
def test_every_client_sees_what_the_model_says(seed: int, overlap: bool, tokens: dict[str, list[list[int]]]) -> None:
    live(seed, overlap=overlap, steps=70, tokens=tokens)


@pytest.mark.slow
@settings(
    max_examples=200, deadline=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
)
@given(seed=st.integers(0, 1 << 32), overlap=st.booleans(), steps=st.integers(5, 200))
def test_many_lives_end_as_the_model_says(
    seed: int, overlap: bool, steps: int, tokens: dict[str, list[list[int]]]
) -> None:
    live(seed, overlap=overlap, steps=steps, tokens=tokens)
