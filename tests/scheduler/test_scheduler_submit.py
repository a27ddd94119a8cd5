"""Submission: whole batches, values instead of exceptions, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import build, prompt

from tokenspeed.plane.plan import Sampling, int32
from tokenspeed.plane.results import Accepted, Rejected


@pytest.mark.contract("SP-4", "IS-20")
def test_a_batch_is_taken_whole_or_not_at_all() -> None:
    rig = build(max_model_len=64)
    valid, invalid = rig.add(prompt(5)), rig.add(prompt(60), max_new=5)
    outcome = rig.submit(valid, invalid)
    assert isinstance(outcome, Rejected)
    assert outcome.field == "max_tokens"
    assert "60 prompt tokens and max_tokens 5 exceed the 64" in outcome.message
    assert rig.scheduler.sizes().held == 0
    assert not rig.scheduler.holds(valid.row)
    assert rig.plan().batch is None
    assert rig.submit(valid) == Accepted(count=1)
    assert rig.scheduler.submit([]) == Accepted(count=0)


@pytest.mark.contract("IS-22")
def test_a_rejected_batch_leaves_running_requests_untouched() -> None:
    alone, rig = build(), build()
    for each in (alone, rig):
        each.new(prompt(9), max_new=8)
    for at in range(6):
        if at % 2:
            rejected = rig.submit(rig.add(prompt(127), max_new=50))
            assert isinstance(rejected, Rejected)
        alone.round()
        rig.round()
    assert rig.requests[0].out == alone.requests[0].out
    assert len(rig.requests[0].out) == 6


@pytest.mark.contract("IS-19")
def test_a_request_that_does_not_fit_the_pool_alone_is_refused_with_the_numbers() -> None:
    rig = build(num_pages=9, page_tokens=4, max_model_len=128)
    fits, too_long = rig.add(prompt(20), max_new=13), rig.add(prompt(20), max_new=14)
    outcome = rig.submit(too_long)
    assert outcome == Rejected(
        message="request 'r1': 20 prompt tokens and max_tokens 14 need 9 KV pages, the pool has 8", field="max_tokens"
    )
    assert rig.submit(fits) == Accepted(count=1)


@pytest.mark.contract("IS-19")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.one_of(st.integers(-3, 20), st.just(10**9)), max_size=5),
    length=st.integers(0, 40),
    max_new=st.integers(-2, 60),
    prompt_from=st.integers(-5, 60),
)
def test_garbage_is_answered_with_a_value(rows: list[int], length: int, max_new: int, prompt_from: int) -> None:
    rig = build(max_model_len=48)
    rig.table.add(rid="x", tokens=int32(prompt(length)), max_new=max_new, sampling=Sampling(), prompt_from=prompt_from)
    outcome = rig.scheduler.submit(rows)
    held = rig.scheduler.sizes().held
    if isinstance(outcome, Rejected):
        assert outcome.message
        assert outcome.field in ("row", "rid", "prompt", "max_tokens")
        assert held == 0
    else:
        assert outcome == Accepted(count=len(rows)) == Accepted(count=held)


@pytest.mark.parametrize(
    ("length", "max_new", "field"), [(0, 3, "prompt"), (4, 0, "max_tokens"), (4, -1, "max_tokens"), (48, 1, "prompt")]
)
def test_the_offending_field_is_named(length: int, max_new: int, field: str) -> None:
    rig = build(max_model_len=48)
    outcome = rig.submit(rig.add(prompt(length), max_new=max_new))
    assert isinstance(outcome, Rejected)
    assert outcome.field == field


def test_a_request_is_not_taken_twice() -> None:
    rig = build()
    request = rig.add(prompt(4))
    assert rig.submit(request, request) == Rejected(message="request 'r0' is already scheduled", field="rid")
    rig.submit(request)
    assert isinstance(rig.submit(request), Rejected)
    rig.run()
    rig.check_tokens()
