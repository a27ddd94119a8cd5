"""The shipped device double with several cache groups: right plans give the right tokens, wrong ones others."""

from __future__ import annotations

import attrs
import pytest
from device_doubles import DECODE, batch, seat

from tokenspeed.plane.plan import BlockCopy, BlockGrants, Dispatch, ExecutionPlan, GroupBlocks, int32
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs
from tokenspeed.testing import HashModelHandle, hash_continuation, hash_model

GROUPS = (
    CacheGroupSpec(name="full", block_tokens=4, blocks_per_parent=2),
    CacheGroupSpec(name="window", kind="window", block_tokens=4, window_tokens=6, blocks_per_parent=2),
    CacheGroupSpec(name="state", kind="state", block_tokens=8, zero_new_blocks=True),
)
SPECS = DeviceSpecs(
    backend="null",
    model_name="hash",
    dtype="int64",
    vocab_size=1009,
    max_model_len=64,
    num_pages=32,
    page_tokens=4,
    groups=GROUPS,
    max_num_seqs=2,
    max_batched_tokens=64,
)
PROMPT = [5, 3, 8, 1, 9, 2, 7, 7, 4, 6, 1]


def grants(slot: int, *blocks: tuple[int, ...]) -> tuple[BlockGrants, ...]:
    return tuple(
        BlockGrants(group=g, slots=int32([slot] * len(b)), indices=int32(range(len(b))), blocks=int32(b))
        for g, b in enumerate(blocks)
    )


FULL, WINDOW, STATE = (2, 3, 4, 5), (10, 11, 12, 13), (20,)
CLEAN = GroupBlocks(group=2, blocks=STATE)


def run(handle: HashModelHandle, *plans: ExecutionPlan) -> list[int]:
    tokens = []
    for plan in plans:
        dispatch = Dispatch(seats=(seat(0),) if plan.seated else ())
        tokens.extend(handle.execute(plan, dispatch, ()).result().tokens)
    return tokens


def plan(round_id: int, start: int, ids: list[int], *, last: bool = True, **streams: object) -> ExecutionPlan:
    return ExecutionPlan(round_id=round_id, batch=batch((0, start, ids), samples=[last]), **streams)


def prefill(**streams: object) -> ExecutionPlan:
    return plan(1, 0, PROMPT, seated=(0,), grants=grants(0, FULL, WINDOW, STATE), pages_to_zero=(CLEAN,), **streams)


EXPECTED = hash_continuation(PROMPT, 3, vocab_size=1009, groups=GROUPS)


def decodes(first: int = 11) -> tuple[ExecutionPlan, ...]:
    return tuple(plan(first + i, 11 + i, DECODE) for i in range(2))


def test_whole_and_chunked_prompts_give_the_tokens_worked_out_from_the_context_alone() -> None:
    assert run(hash_model(SPECS), prefill(), *decodes()) == EXPECTED
    first = plan(
        1, 0, PROMPT[:6], last=False, seated=(0,), grants=grants(0, FULL, WINDOW, STATE), pages_to_zero=(CLEAN,)
    )
    assert run(hash_model(SPECS), first, plan(2, 6, PROMPT[6:]), *decodes()) == EXPECTED


def test_a_full_group_alone_gives_the_tokens_it_always_gave() -> None:
    single = attrs.evolve(SPECS, groups=GROUPS[:1])
    assert run(hash_model(single), prefill()._replace(grants=grants(0, FULL), pages_to_zero=()), *decodes()) == (
        hash_continuation(PROMPT, 3, vocab_size=1009)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(grants(0, (2, 3, 4, 3)), id="a block of the full group"),
        pytest.param(grants(0, (), (10, 11, 13))[1:], id="a block in the window"),
        pytest.param(grants(0, (), (), (21,))[2:], id="another state"),
    ],
)
def test_a_wrong_grant_changes_the_tokens(wrong: tuple[BlockGrants, ...]) -> None:
    steps = decodes()
    assert run(hash_model(SPECS), prefill(), steps[0]._replace(grants=wrong), steps[1]) != EXPECTED


def test_a_block_behind_the_window_may_be_anything() -> None:
    steps = decodes()
    gone = grants(0, (), (31,))[1:]
    assert run(hash_model(SPECS), prefill(), steps[0]._replace(grants=gone), steps[1]) == EXPECTED


def test_a_state_that_was_not_cleaned_changes_the_tokens() -> None:
    assert run(hash_model(SPECS), prefill()._replace(pages_to_zero=()), *decodes()) != EXPECTED


def test_copied_blocks_of_every_group_carry_a_request_over() -> None:
    handle = hash_model(SPECS)
    run(handle, prefill())
    copies = (
        *(BlockCopy(group=0, source=a, destination=a + 30) for a in FULL[:3]),
        *(BlockCopy(group=1, source=a, destination=a + 30) for a in WINDOW[1:3]),
        BlockCopy(group=2, source=20, destination=22),
    )
    moved = grants(0, (32, 33, 34, 35), (50, 41, 42, 43), (22,))
    assert run(handle, plan(2, 11, [EXPECTED[0]], pages_to_copy=copies, grants=moved), decodes()[1]) == EXPECTED[1:]


def test_a_parent_that_another_group_writes_to_loses_what_it_held() -> None:
    handle = hash_model(SPECS)
    run(handle, prefill())
    # Block 1 of the state group is parent 1, which holds the full group's blocks 2 and 3.
    run(handle, ExecutionPlan(round_id=2, pages_to_zero=(GroupBlocks(group=2, blocks=(1,)),)))
    assert run(handle, *decodes()) != EXPECTED[1:]


@pytest.mark.contract("RA-33")
def test_copies_read_every_source_before_another_groups_copy_writes_there() -> None:
    handle = hash_model(SPECS)
    run(handle, prefill())
    copies = (
        BlockCopy(group=2, source=20, destination=1),  # parent 1, of the full group until now
        BlockCopy(group=0, source=2, destination=32),
        BlockCopy(group=0, source=3, destination=33),
    )
    moved = (*grants(0, (32, 33, 4, 5)), *grants(0, (), (), (1,))[2:])
    assert run(handle, plan(2, 11, [EXPECTED[0]], pages_to_copy=copies, grants=moved), decodes()[1]) == EXPECTED[1:]
