"""Retraction images: suspended and restored without computing anything again, whatever happens meanwhile."""

from __future__ import annotations

import pytest
from scheduler_rig import Request, Rig, build, prompt
from toy_groups import some_groups

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import LoadBackOp, RestoreOp, SnapshotOp, WriteBackOp
from tokenspeed.scheduler.config import Retraction, WritePolicy
from tokenspeed.scheduler.states import State

POLICIES = pytest.mark.parametrize("policy", list(WritePolicy), ids=lambda policy: policy.value)
NO_RECOMPUTE = (Retraction.SNAPSHOT, Retraction.ABORT)


def rig_of(policy: WritePolicy = WritePolicy.WRITE_THROUGH, **changes: object) -> Rig:
    fields: dict[str, object] = {
        "num_pages": 11,
        "host_parents": 65,
        "images": 2,
        "write_policy": policy,
        "retraction": NO_RECOMPUTE,
        "resume_headroom_tokens": 4,
        **changes,
    }
    return build(**fields)


def state(rig: Rig, request: Request) -> State:
    return rig.scheduler.life.of(request.row)


def squeezed(rig: Rig, *, max_new: int = 20) -> tuple[Request, Request]:
    """Two long decodes in a pool for one and a half, just suspended the newer one."""
    old, new = rig.new(prompt(13, seed=1), max_new=max_new), rig.new(prompt(14, seed=2), max_new=max_new)
    rig.run(until=lambda: bool(new.preempted))
    return old, new


@POLICIES
@pytest.mark.contract("SP-42", "SP-43", "SP-47", "CT-4", "CT-7", "SP-35")
def test_a_suspended_request_resumes_where_it_stopped_and_computes_nothing_twice(policy: WritePolicy) -> None:
    rig = rig_of(policy)
    old, new = squeezed(rig)
    (snapshot,) = rig.host.of(SnapshotOp)
    assert isinstance(snapshot, SnapshotOp)
    assert rig.scheduler.sizes().suspended == 1
    rig.run()
    rig.check_tokens()
    assert (old.finish, new.finish) == (Finish.LENGTH, Finish.LENGTH)
    assert len(rig.host.of(RestoreOp)) == new.preempted == 1
    assert new.computed_tokens == len(new.computed)
    rig.check_idle()


@pytest.mark.contract("SP-43", "SP-45", "RA-27")
def test_one_plan_stores_all_of_a_victim_and_gives_its_blocks_and_its_slot_away() -> None:
    rig = rig_of(WritePolicy.WRITE_BACK, max_num_seqs=2)
    old, new = rig.new(prompt(13, seed=1), max_new=20), rig.new(prompt(14, seed=2), max_new=20)
    rig.run(until=lambda: rig.scheduler.pool.empty == 0)
    held, slot = {}, {}
    while not new.preempted:
        held, slot = dict(rig.scheduler.snapshot().tables), int(rig.table.schedule.slot[new.row])
        plan = rig.round()
    stores = [op for op in plan.device_ops() if isinstance(op, WriteBackOp)]
    (snapshot,) = [op for op in plan.device_ops() if isinstance(op, SnapshotOp)]
    assert all(op.stream_ordered for op in stores)
    stored = [block for op in stores for block in op.device_blocks]
    stored += [block for part in snapshot.tail for block in part.blocks]
    assert sorted(stored) == sorted(held[new.row])
    assert snapshot.slot == slot
    assert rig.table.schedule.slot[new.row] == -1
    assert not set(stored) & set(rig.scheduler.snapshot().references)
    # It can be given to the next one that comes while the image is being stored: here, the victim itself.
    assert slot in rig.scheduler.residents.state.empty_slots
    rig.abort(old)
    late = rig.new(prompt(3), max_new=1)
    rig.run(until=lambda: bool(late.forwards))
    (restore,) = rig.host.of(RestoreOp)
    assert isinstance(restore, RestoreOp)
    assert restore.slot == rig.table.schedule.slot[new.row]
    assert {restore.slot, int(rig.table.schedule.slot[late.row])} == {0, 1}
    rig.run()
    rig.check_tokens()


@POLICIES
@pytest.mark.contract("SP-44", "SP-19", "SP-21")
@pytest.mark.parametrize("kind", [WriteBackOp, SnapshotOp])
def test_a_suspended_request_waits_for_both_of_its_stores(kind: type, policy: WritePolicy) -> None:
    rig = rig_of(policy)
    rig.host.held = {kind}
    old, new = squeezed(rig)
    rig.abort(old)
    for _ in range(6):
        rig.round()
    assert state(rig, new) is State.IMAGING
    rig.host.held = set()
    plan = rig.plan()
    assert [op.slot for op in plan.device_ops() if isinstance(op, RestoreOp)] == [rig.table.schedule.slot[new.row]]
    assert plan.seated == (new.row,)
    rig.land()
    rig.run()
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-44", "RA-40")
def test_a_restored_request_is_not_planned_before_the_restore_is_acknowledged() -> None:
    rig = rig_of()
    old, new = squeezed(rig)
    rig.host.held = {RestoreOp}
    rig.run(until=lambda: old.finish is not Finish.RUNNING)
    forwards = new.forwards
    for _ in range(4):
        rig.round()
    assert state(rig, new) is State.RESTORING
    assert rig.scheduler.sizes().suspended == 1
    assert new.forwards == forwards
    rig.host.held = set()
    plan = rig.round()
    assert plan.batch is not None
    assert plan.batch.rows.tolist() == [new.row]
    rig.run()
    rig.check_tokens()


@pytest.mark.contract("SP-40")
def test_what_a_restore_overwrites_is_not_zeroed() -> None:
    rig = rig_of(zero_new_blocks=True)
    squeezed(rig)
    rig.run()  # the rig checks each plan
    assert rig.host.of(RestoreOp)
    rig.check_tokens()


def test_what_is_still_on_the_device_is_shared_by_a_restore() -> None:
    rig = rig_of(num_pages=12)
    old, new = squeezed(rig)
    rig.abort(old)
    rig.run()
    (restore,) = rig.host.of(RestoreOp)
    assert isinstance(restore, RestoreOp)
    assert len(restore.pages) == 0
    assert sum(len(part.blocks) for part in restore.tail) == 1
    assert new.computed_tokens == len(new.computed)
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-42")
def test_suspended_requests_come_back_in_the_order_of_their_retraction_ahead_of_new_ones() -> None:
    rig = rig_of(num_pages=15)
    rows = [rig.new(prompt(13, seed=seed), max_new=20) for seed in range(3)]
    rig.run(until=lambda: rig.scheduler.sizes().suspended == 2)
    late = rig.new(prompt(3, seed=9), max_new=2)
    order: list[int] = []
    while rig.scheduler.sizes().held:
        plan = rig.round()
        order += plan.seated
    away = [request.row for request in sorted(rows, key=lambda request: -request.row) if request.preempted]
    assert order[: len(away)] == away
    assert order.index(late.row) == len(away)
    rig.check_tokens()


@POLICIES
@pytest.mark.parametrize("moment", ["imaging", "suspended", "restoring"])
@pytest.mark.parametrize("late", [WriteBackOp, SnapshotOp, RestoreOp], ids=lambda kind: kind.__name__)
def test_an_abort_at_any_time_frees_everything_once(moment: str, late: type, policy: WritePolicy) -> None:
    rig = rig_of(policy)
    old, new = rig.new(prompt(13, seed=1), max_new=20), rig.new(prompt(14, seed=2), max_new=20)
    if moment == "imaging":
        rig.host.held = {WriteBackOp, SnapshotOp}
    elif moment == "restoring":
        rig.host.held = {RestoreOp}
    rig.run(until=lambda: state(rig, new).name.lower() == moment)
    rig.host.held = {late}
    rig.abort(new)
    rig.abort(new)
    for _ in range(3):
        rig.round()
    if moment == "restoring" and late is RestoreOp:
        assert state(rig, new) is State.DISCARDING
        assert len(rig.blocks(new)) > 0
    else:
        assert new.retired
    rig.host.held = set()
    rig.run()
    rig.check_tokens()
    assert old.finish is Finish.LENGTH
    rig.check_idle()
    assert rig.scheduler.images.held == 0


@pytest.mark.contract("SP-46")
def test_without_a_free_image_the_newest_resident_is_ended() -> None:
    rig = rig_of(num_pages=12, images=1)
    old, middle = rig.new(prompt(9, seed=1), max_new=30), rig.new(prompt(9, seed=2), max_new=30)
    newest = rig.new(prompt(9, seed=3), max_new=30)
    rig.run(until=lambda: bool(newest.preempted))
    assert rig.scheduler.images.held == 1
    plans = rig.run(until=lambda: middle.finish is not Finish.RUNNING or old.finish is not Finish.RUNNING)
    ended = [abort.row for plan in plans for abort in plan.aborts]
    assert ended == [middle.row]
    rig.run()
    assert old.finish is newest.finish is Finish.LENGTH
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-46")
def test_a_victim_that_cannot_be_imaged_any_more_stays_and_the_newest_goes_in_its_place() -> None:
    """Its image was possible when it was chosen; until its forward had landed stores took the room on the host."""
    rig = rig_of(num_pages=15, host_parents=8, images=1, max_num_seqs=3, chunk_tokens=2, overlap_schedule_depth=1)
    elder, victim = rig.new(prompt(8), max_new=40), rig.new(prompt(8, seed=1), max_new=40)
    for _ in range(10):
        rig.round()
    newest = rig.new(prompt(12, seed=2), max_new=4)
    rig.host.held = {WriteBackOp}
    rig.run(until=lambda: state(rig, victim) is State.YIELDING)
    plan = rig.round()
    assert state(rig, victim) is State.DECODING
    assert state(rig, newest) is State.YIELDING
    assert plan.preempted == ()
    forwards = victim.forwards
    rig.run(until=lambda: victim.forwards > forwards)
    assert newest.preempted == 1
    rig.host.held = set()
    rig.run()
    assert (elder.preempted, elder.finish) == (0, Finish.LENGTH)
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-46")
def test_without_a_snapshot_pool_the_chain_goes_on() -> None:
    rig = rig_of(images=0, retraction=(Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT))
    _, new = squeezed(rig)
    assert state(rig, new) is State.WAITING
    rig.run()
    rig.check_tokens()


def test_without_host_room_for_its_pages_a_victim_is_computed_again() -> None:
    rig = rig_of(host_parents=2, retraction=(Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT))
    rig.host.held = {WriteBackOp}
    _, new = squeezed(rig)
    assert state(rig, new) is State.WAITING
    rig.host.held = set()
    rig.run()
    rig.check_tokens()


def test_a_decode_whose_load_was_not_acknowledged_yet_can_be_imaged() -> None:
    """Its forwards waited for the load, and the store waits for its forwards."""
    rig = rig_of(num_pages=9, host_parents=65)
    first = prompt(16, seed=2)
    for tokens in (first, prompt(24, seed=5), prompt(24, seed=6)):
        rig.new(tokens, max_new=1)
        rig.run()
    rig.host.held = {LoadBackOp}
    rig.new(prompt(9, seed=1), max_new=20)
    rig.round()
    again = rig.new(first, max_new=14)
    rig.run(until=lambda: bool(again.preempted))
    assert rig.host.of(LoadBackOp)
    assert state(rig, again) is State.IMAGING
    rig.host.held = set()
    rig.run()
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-14")
def test_the_cache_cannot_be_cleared_while_a_request_is_suspended() -> None:
    rig = rig_of()
    old, new = squeezed(rig)
    rig.host.held = {SnapshotOp}
    rig.abort(old)
    rig.run(until=lambda: bool(old.retired))
    assert not rig.scheduler.can_clear_cache()
    rig.host.held = set()
    rig.run()
    assert new.finish is Finish.LENGTH
    rig.check_idle()


@POLICIES
@pytest.mark.parametrize("kind", list(some_groups(4)))
@pytest.mark.parametrize("depth", [0, 1])
def test_every_kind_of_group_survives_suspension(kind: str, depth: int, policy: WritePolicy) -> None:
    rig = rig_of(policy, num_pages=23, images=3, groups=some_groups(4)[kind], overlap_schedule_depth=depth)
    rig.host.delay = depth
    requests = [rig.new(prompt(9 + seed, seed=seed), max_new=40) for seed in range(6)]
    rig.run()
    rig.check_tokens()
    assert all(request.finish in (Finish.LENGTH, Finish.ABORT) for request in requests)
    rig.check_idle()
