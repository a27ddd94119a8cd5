"""The order of the device's jobs: each reason for it, and the run that goes wrong where it does not hold."""

from __future__ import annotations

import fences
import pytest
from order_rig import CASES, SCENARIOS, Order, run, wrong_without

from tokenspeed.device.kv.host_fences import Fence

NAMES = [f"{order.name}-{executor}-{SCENARIOS[order].run.__name__}" for order, executor in CASES]


@pytest.mark.contract("RA-25", "RA-31", "OL-1", "OL-14", "AF-5")
@pytest.mark.parametrize(("order", "executor"), CASES, ids=NAMES)
def test_in_order_bytes_and_tokens_are_right(order: Order, executor: str) -> None:
    run(order, executor, without=False)


@pytest.mark.parametrize(("order", "executor"), CASES, ids=NAMES)
def test_out_of_order_a_byte_or_a_token_is_wrong(order: Order, executor: str) -> None:
    """An order that can be left out without a wrong answer is one that nobody needs, or that nobody tests."""
    missed = wrong_without(order, executor)
    assert missed


def test_every_place_that_waits_or_queues_stands_for_a_fence_that_a_run_misses() -> None:
    named = {fence.name for fence in (*Fence, *Order)}
    assert list(fences.unlisted(named)) == []


def test_a_place_that_is_not_listed_is_found() -> None:
    site = "executors/landing.py StreamLanding.result self.event.wait"
    assert site in fences.sites()
    assert site in fences.SITES
    assert "a fence without a scenario: RESULT_BEHIND_COPY" in list(fences.unlisted({"OTHER"}))
    assert "a fence without a place in the code: OTHER" in list(fences.unlisted({"OTHER"}))
