"""A decode node's admissions: who is looked at again, and what the device is told of tables that changed twice."""

from __future__ import annotations

from model_node import node
from model_seen import Seen
from scheduler_rig import config, prompt

from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.scheduler.config import Role
from tokenspeed.scheduler.policy import Fcfs


def test_a_request_that_did_not_fit_beside_the_promises_to_another_is_admitted_when_that_one_has_gone() -> None:
    one = node(config(role=Role.DECODE, num_pages=9), Fcfs(), Seen())
    for seed in range(2):
        one.submit(prompt(20, seed=seed), copies=1, max_new=1, eos_ends=False)
    one.round()
    assert len(one.peer.open) == 1
    for _ in range(8):
        one.round()
    assert not one.rig.scheduler.sizes().held
    one.rig.check_tokens()


def test_of_a_table_entry_that_changed_twice_before_a_batch_the_device_is_told_once_or_alike() -> None:
    one = node(config(role=Role.DECODE), Fcfs(), Seen())
    one.submit(prompt(9), copies=2, max_new=4, eos_ends=False)
    one.round()
    for row in tuple(one.peer.open):
        one.end_transfer(row, ok=True)
    plan = one.plan()
    told: dict[tuple[int, int], int] = {}
    for grant in plan.grants:
        for slot, index, block in zip(grant.slots.tolist(), grant.indices.tolist(), grant.blocks.tolist(), strict=True):
            assert told.setdefault((slot, index), block) == block
    assert len(told) == 6
    one.rig.land()
    one.rig.check_tokens()


def test_the_only_block_of_a_window_that_a_node_was_sent_gets_the_name_of_its_place() -> None:
    window = CacheGroupSpec(name="window", kind="window", window_tokens=3, block_tokens=4)
    one = node(config(role=Role.DECODE, groups=(window,)), Fcfs(), Seen())
    one.submit(prompt(12), copies=1, max_new=9, eos_ends=False, prompt_from=0)
    while one.rig.scheduler.sizes().held:
        one.round()
        one.check()
    assert {event.group for event in one.rig.events} == {0}
