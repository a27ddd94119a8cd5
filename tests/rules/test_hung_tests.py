"""Which tests `.ci/run` runs again: those that the watchdog ended, if nothing else failed."""

from __future__ import annotations

import pytest
from hung_tests import hung_tests

HUNG = "tests/a.py::test_a[1, 'b']"
ENDED = f"""worker 'gw0' crashed while running "{HUNG}"\n"""
SUMMARY = f"FAILED {HUNG} - worker 'gw0' crashed while running \"tests...\n"
STACKS = "..Timeout (0:05:00)!\nThread 0x0000 (most recent call first):\n"


def test_a_test_that_the_watchdog_ended_is_named_once_however_often_it_hung() -> None:
    assert hung_tests(STACKS + ENDED + SUMMARY + "1 failed, 3 passed in 8s") == [HUNG]
    assert hung_tests((STACKS + ENDED + SUMMARY) * 3) == [HUNG]


@pytest.mark.parametrize(
    "log",
    [
        "4 passed in 8s",
        "FAILED tests/b.py::test_b - assert 0\n1 failed",
        STACKS + ENDED + SUMMARY + "FAILED tests/b.py::test_b - assert 0\n",
        ENDED + SUMMARY,
    ],
    ids=["all passed", "one failed", "another one failed", "a process that crashed by itself"],
)
def test_nothing_is_named_where_something_failed_or_crashed(log: str) -> None:
    assert hung_tests(log) == []
