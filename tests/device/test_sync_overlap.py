"""What one wait of the forward thread costs: the device stands still while the next step is prepared."""

from __future__ import annotations

import itertools

import pytest
from sim_rig import hand_device

STEP_S, PROLOGUE_S, STEPS = 0.010, 0.004, 5


@pytest.mark.contract("DP-56")
@pytest.mark.parametrize(("waits", "idle_s"), [(False, 0.0), (True, PROLOGUE_S)])
def test_a_wait_before_each_launch_takes_the_overlap_away_whatever_the_depth(waits: bool, idle_s: float) -> None:
    with hand_device() as device:
        for step in range(STEPS):
            event = device.backend.exec_stream.submit(lambda: device.work.charge(STEP_S), f"step {step}")
            if waits:
                device.advance_to(device.log.of(f"step {step}")[0][1])
                assert event.query()
            device.advance(PROLOGUE_S)
        spans = [device.log.of(f"step {step}")[0] for step in range(STEPS)]
    gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(spans)]
    assert gaps == pytest.approx([idle_s] * (STEPS - 1))
