"""Greedy tokens and log-probabilities of the default model equal the reference's, whatever the engine does meanwhile.

Seven runs cover every possible pair of levels of depth, executor, prefix cache, chunking and pressure, on the
native forward with float32 weights; the full product is slow. All prompts are in one engine and arrive at
random rounds, some come a second time, copies of some are aborted at random rounds. What each run did is
counted, so that none is vacuous. Blocks are spoiled whenever they change hands (TOKENSPEED_CAPTURE_CHECK).
"""

from __future__ import annotations

import itertools

import attrs
import pytest
from greedy_reference import Prompt, read_prompts
from matrix_rig import Case, Flow, Flows, Pressure, Shown, Witness, drive, faults

from tokenspeed.compose.engine import rank_engine
from tokenspeed.settings.model import WritePolicy
from tokenspeed.testing import RecordingLink

REFERENCE = "smollm2-135m-q4_1.json"
LONGEST_UNDER_PRESSURE = 280
NEW_TOKENS, NEW_TOKENS_UNDER_PRESSURE = 48, 40


def case(flow: Flow, depth: int, pressure: Pressure, *, prefix: bool, whole: bool, back: bool = False) -> Case:
    policy = WritePolicy.WRITE_BACK if back else WritePolicy.WRITE_THROUGH
    return Case(flow=flow, depth=depth, prefix=prefix, whole=whole, pressure=pressure, policy=policy)


ORDINARY = (
    case(Flow.STREAMS, 0, Pressure.NONE, prefix=True, whole=False),
    case(Flow.FUTURES, 1, Pressure.NONE, prefix=False, whole=True),
    case(Flow.SYNCHRONOUS, 0, Pressure.NONE, prefix=False, whole=False),
    case(Flow.STREAMS, 1, Pressure.RESTORE, prefix=True, whole=True),
    case(Flow.FUTURES, 0, Pressure.RESTORE, prefix=True, whole=False, back=True),
    case(Flow.STREAMS, 1, Pressure.RECOMPUTE, prefix=False, whole=False),
    case(Flow.FUTURES, 0, Pressure.RECOMPUTE, prefix=True, whole=True),
)
POSSIBLE = tuple(
    made
    for flow, depth, prefix, whole, pressure in itertools.product(Flow, (0, 1), (True, False), (True, False), Pressure)
    if (made := case(flow, depth, pressure, prefix=prefix, whole=whole)).possible
)


def pairs(cases: tuple[Case, ...]) -> set[tuple[tuple[int, object], ...]]:
    """Every two levels that one of the cases has together; asynchronous and synchronous futures are one level."""
    found = set()
    for one in cases:
        executor = Flow.STREAMS if one.flow is Flow.STREAMS else Flow.FUTURES
        found.update(itertools.combinations(enumerate((executor, *one.levels()[1:])), 2))
    return found


def test_the_ordinary_runs_have_every_possible_pair_of_levels() -> None:
    assert pairs(ORDINARY) == pairs(POSSIBLE)
    assert {one.flow for one in ORDINARY} == set(Flow)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.contract("DO-5", "SP-48", "AF-6", "CT-1", "CT-2", "CT-7", "SP-42", "OL-3")
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=str(one)) for one in ORDINARY),
        *(pytest.param(one, id=f"product: {one}", marks=pytest.mark.slow) for one in POSSIBLE),
    ],
)
def test_tokens_and_logprobs_equal_the_reference(case: Case, record_property: pytest.RecordProperty) -> None:
    wanted = prompts(under_pressure=case.pressure is not Pressure.NONE)
    link, shown = RecordingLink(), Shown()
    meter, witness = Flows(shown=shown), Witness(shown)
    with rank_engine(case.settings(), connect=lambda info, wakeup: link, history=witness, meter=meter) as engine:
        drive(engine, link, wanted, shown, seed=POSSIBLE.index(attrs.evolve(case, policy=WritePolicy.WRITE_THROUGH)))
        scheduler = engine.loop.scheduler
        assert scheduler.sizes().held == 0
        assert scheduler.available_lcm_blocks() == scheduler.num_usable_pages
    found, count = faults(wanted, link)
    for name, value in (attrs.asdict(shown) | count).items():
        record_property(name, value)
    assert not found
    assert count["excused"] <= 2
    assert all(len(link.tokens(prompt.rid)) == len(prompt.expected) for prompt in wanted)
    assert count["logprobs"] > 200
    assert did_what_it_says(case, shown) == []


def prompts(*, under_pressure: bool) -> list[Prompt]:
    count = NEW_TOKENS_UNDER_PRESSURE if under_pressure else NEW_TOKENS
    return [
        attrs.evolve(prompt, expected=prompt.expected[:count])
        for prompt in read_prompts(REFERENCE)
        if len(prompt.ids) <= LONGEST_UNDER_PRESSURE or not under_pressure
    ]


def did_what_it_says(case: Case, shown: Shown) -> list[str]:
    """What a run of `case` did not show, or should not have."""
    wanted = {
        "overlapped": case.depth == 1,
        "partial_chunks": not case.whole,
        "cached_tokens": case.prefix,
        "retracted": case.pressure is not Pressure.NONE,
        "restored": case.pressure is Pressure.RESTORE,
        "stored": case.pressure is Pressure.RESTORE,
        "async_steps": case.flow is Flow.FUTURES,
        "sync_fallback_steps": case.flow is Flow.FUTURES,
        "mixed": True,
        "aborted_resident": True,
        "aborted_in_flight": case.depth == 1,
    }
    if case.pressure is not Pressure.RESTORE:  # with images some are computed again all the same: there are few
        wanted["recomputed"] = case.pressure is Pressure.RECOMPUTE
    return [name for name, expected in wanted.items() if (getattr(shown, name) > 0) is not expected]
