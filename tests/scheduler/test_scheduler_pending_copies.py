"""What one plan moves and stores: an image reads what a block holds before the copies of its own plan."""

from __future__ import annotations

import pytest
from scheduler_rig import build, prompt
from toy_groups import some_groups

from tokenspeed.plane.plan import RestoreOp
from tokenspeed.scheduler.config import Retraction


@pytest.mark.contract("RA-25", "SP-36", "SP-43")
def test_a_victim_whose_state_moves_in_the_same_plan_is_imaged_with_the_state_it_had() -> None:
    restored = 0
    for length in range(6, 20):
        rig = build(
            num_pages=10,
            groups=some_groups(4)["full and state"],
            host_parents=65,
            images=2,
            retraction=(Retraction.SNAPSHOT, Retraction.ABORT),
            resume_headroom_tokens=0,
        )
        rig.new(prompt(6, seed=1), max_new=26)
        for _ in range(10):
            rig.round()
        rig.new(prompt(length, seed=2), max_new=8)
        rig.run()
        rig.check_tokens()
        restored += len(rig.host.of(RestoreOp))
        rig.check_idle()
    assert restored > 5
