"""Random lives of requests over the real scheduler, in all its roles and tiers, with all checked after each step.

The toy devices around it (`toy_groups`, `toy_host`, `toy_storage`, `toy_peer`) read and write as late as the contract
lets them, from memory as it is by then, so that a block given away too early shows as a wrong token.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_choices import ACTIONS, CHAINS, SETUP, Choices
from model_seen import Seen
from model_world import KINDS_OF_LIFE, World, run_trace, world

import tokenspeed.scheduler
from tokenspeed.scheduler.config import Role
from tokenspeed.scheduler.states import State

ROOM = Path(tokenspeed.scheduler.__file__).parent
ANY: Choices = MappingProxyType({})


def drawn(choices: Choices) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})


STEPS: st.SearchStrategy[tuple[str, dict[str, object]]] = st.sampled_from(
    [name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]
).flatmap(lambda name: st.tuples(st.just(name), drawn(ACTIONS[name][1])))


class Lives(RuleBasedStateMachine):
    """`bias`: of `SETUP`, the choices that are left."""

    def __init__(self, role: Role, bias: Choices, seen: Seen) -> None:
        super().__init__()
        self.role, self.bias, self.seen = role, bias, seen
        self.world: World

    @initialize(chosen=drawn(SETUP))
    def begin(self, chosen: dict[str, object]) -> None:
        for name, left in self.bias.items():
            chosen[name] = left[SETUP[name].index(chosen[name]) % len(left)]
        self.world = world(self.role, chosen, self.seen)

    @rule(step=STEPS, then=st.sampled_from((0, 0, 1, 2)))
    def act(self, step: tuple[str, dict[str, object]], then: int) -> None:
        """One action, chosen by weight, and a few rounds behind it."""
        name, arguments = step
        if self.world.can(name):
            getattr(self.world, name)(**arguments)
        self.world.rounds(count=then)

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def every_rule_is_kept(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def live(role: Role, seen: Seen, *, lives: int, steps: int, bias: Choices = ANY) -> None:
    # What fails is short already; to have it shrunk, which may take minutes, add Phase.shrink.
    chosen = settings(
        max_examples=lives,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Lives(role, bias, seen), settings=chosen)


def check_not_vacuous(seen: Seen) -> None:
    counts = seen.counts
    wanted = {
        "hits": 200,
        "boundary copies": 50,
        "state moves": 200,
        "evicted": 1000,
        "ordinary write-backs": 500,
        "ordered write-backs of evicted": 300,
        "ordered write-backs of images": 10,
        "load-backs": 50,
        "suspensions": 20,
        "snapshots": 20,
        "restores": 10,
        "recomputes": 20,
        "capacity aborts": 20,
        "cache clears": 20,
        "frozen plans": 100,
        "spare seats": 20,
        "sources given away": 2,
        "storage query": 100,
        "storage get": 10,
        "storage put": 100,
        "storage cancel": 5,
        "storage operations cancelled": 1,
        "put failed": 1,
        "get failed": 1,
        "query failed": 1,
        "remote prefills": 50,
        "remote decodes": 50,
        "remote failures told": 5,
        "transfer done FENCED": 3,
        "transfer failed FENCED": 1,
        **{f"lived {state.name}": 1 for state in State if state is not State.FREE},
        **{f"abort {state.name}": 1 for state in State if state is not State.FREE},
    }
    missing = {name: (counts[name], least) for name, least in wanted.items() if counts[name] < least}
    assert not missing, missing


@pytest.mark.contract("SP-1", "SP-16", "SP-41", "SP-44", "SP-52", "SP-53", "SP-54", "SP-58")
@pytest.mark.contract("IS-20", "KM-2", "CT-7", "CT-9")
@pytest.mark.timeout(900)
def test_random_lives_keep_every_rule_and_leave_nothing_out() -> None:
    seen = Seen()
    for role, bias in KINDS_OF_LIFE:
        live(role, seen, lives=25, steps=40, bias=bias)
    for seed in range(150):
        run_trace(seed, steps=50, seen=seen)

    assert seen.counts["steps"] > 10_000
    check_not_vacuous(seen)


@pytest.mark.contract("SP-44")
@pytest.mark.parametrize("seed", [1, 5, 14, 27])
def test_a_request_alone_gets_in_though_what_it_shares_is_scattered_over_parents(seed: int) -> None:
    seen = Seen()
    wide: dict[str, object] = {"prefix": True, "policy": 0, "room": 36, "page": 5, "groups": "wide blocks", "seqs": 2}
    kept: dict[str, object] = {"chain": CHAINS[seed % 2], "host": 40, "images": 1 + seed % 2, "storage": False}
    run_trace(seed, steps=50, seen=seen, role=Role.PLAIN, mirrored=False, **wide, **kept)
    assert seen.counts["restores"]


@pytest.mark.contract("SP-1", "SP-3")
def test_plans_of_random_lives_are_equal_under_different_hash_seeds() -> None:
    script = (
        "from model_seen import Seen\nfrom model_world import run_trace\n"
        "for seed in range(12): print(run_trace(seed, steps=50, seen=Seen(), mirrored=False))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOM.parent.parent)])
    digests = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=240
        )
        digests.append(done.stdout.split())
    assert len(set(digests[0])) == 12
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_long_random_lives_keep_every_rule(block: int) -> None:
    seen = Seen()
    for seed in range(10_000 + 100 * block, 10_100 + 100 * block):
        run_trace(seed, steps=150, seen=seen)
    assert seen.counts["steps"] == 15_000
    assert seen.counts["restores"] > 10
