"""The allow-list of queued arguments."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from device_doubles import CountingWakeup, batch, granted, plan, seat

from tokenspeed.device.capture import Strict, Trusting, capture_check
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import Dispatch, LogprobPlan


@attrs.frozen
class FrozenElsewhere:
    value: int = 1


VIEW_OF_WRITABLE = np.zeros(4, dtype=np.int32)[:2]
VIEW_OF_WRITABLE.setflags(write=False)


@pytest.mark.contract("DP-49")
@pytest.mark.parametrize(
    "argument",
    [
        (plan(work=batch((0, 0, [1, 2])), grants=granted((0, 0, 3))), Dispatch(seats=(seat(0),))),
        Dispatch(logprobs=LogprobPlan(sampled=((0, 5),), prompt=((0, 1, 2),), prompt_targets=((4,),))),
        ((1, 2), (-1, 3)),
        ("a path", b"bytes", None, True, 1.5),
        np.frombuffer(b"1234", dtype=np.int32),
    ],
    ids=["plan", "logprobs", "rows", "scalars", "bytes"],
)
def test_plain_values_pass(argument: object) -> None:
    Strict().check("execute", argument)


@pytest.mark.contract("DP-49", "DP-54")
@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ([1, 2], "builtins.list"),
        ({"a": 1}, "builtins.dict"),
        (torch.zeros(2), "torch.Tensor"),
        (np.zeros(2, dtype=np.int32), "writable array"),
        (VIEW_OF_WRITABLE, "writable array"),
        (lambda: None, "function"),
        (CountingWakeup(), "CountingWakeup"),
        (FrozenElsewhere(), "FrozenElsewhere"),
        (np.array([object()]), "writable array"),
        (plan(cache=[]), r"argument.cache: a builtins.list"),
        ((1, (2, [3])), r"argument\[1\]\[1\]"),
    ],
)
def test_anything_else_is_named_and_refused(argument: object, named: str) -> None:
    with pytest.raises(InvariantBroken, match=named):
        Strict().check("execute", argument)


def test_the_check_is_switched_on_by_debug_settings_or_by_the_environment() -> None:
    assert isinstance(capture_check({}), Trusting)
    assert isinstance(capture_check({"TOKENSPEED_CAPTURE_CHECK": "0"}), Trusting)
    assert isinstance(capture_check({"TOKENSPEED_CAPTURE_CHECK": "1"}), Strict)
    assert isinstance(capture_check({}, debug=True), Strict)
    Trusting().check("execute", [1, 2])
