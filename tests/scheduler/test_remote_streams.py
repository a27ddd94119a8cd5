"""A prompt computed on one node and decoded on another: streams, states, failures, and who holds pages how long."""

from __future__ import annotations

import pytest
from remote_rig import Pair, Side, pair
from scheduler_rig import build, prompt
from toy_groups import some_groups

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import FROM_DEVICE
from tokenspeed.plane.results import TransferDone
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.scheduler.config import Role
from tokenspeed.scheduler.states import State

WINDOWED = (
    CacheGroupSpec(block_tokens=4),
    CacheGroupSpec(name="window", kind="window", block_tokens=4, window_tokens=9),
)


def receiving(both: Pair, rid: str) -> tuple[int, ...]:
    """Landing blocks of the decode side."""
    return both.decode.streams[rid].pages[0].blocks


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", [(), WINDOWED, *some_groups(4).values()])
def test_prompts_computed_on_one_node_go_on_on_the_other_with_the_same_tokens(
    groups: tuple[CacheGroupSpec, ...], depth: int
) -> None:
    both = pair(overlap_schedule_depth=depth, groups=groups, max_num_seqs=4)
    for seed in range(9):
        both.new(prompt(5 + 7 * seed, seed=seed % 6), max_new=1 + seed)
        both.round()
    both.run()
    assert all(request.finish is Finish.LENGTH for request in both.decode.rig.requests)
    assert all(request.forwards == max(len(request.out) - 1, 0) for request in both.decode.rig.requests)
    both.check()


@pytest.mark.contract("SP-28", "SP-56")
def test_an_admitted_prompt_of_a_decode_node_gets_a_stream_into_all_its_blocks_and_no_chunk() -> None:
    rig = build(role=Role.DECODE)
    side = Side(rig)
    request = rig.new(prompt(18), max_new=4)
    plan = side.round()
    assert plan.batch is None
    assert plan.seated == (request.row,)
    (stream,) = plan.remote_prefill
    assert (stream.row, stream.start) == (request.row, 0)
    assert stream.pages[0].blocks == rig.blocks(request)
    assert len(stream.pages[0].blocks) == 5
    assert rig.scheduler.life.of(request.row) is State.REMOTE_RECEIVE
    for _ in range(5):
        plan = side.round()
        assert (plan.batch, plan.remote_prefill) == (None, ())


def test_the_first_input_of_a_received_prompt_is_its_bootstrap_token() -> None:
    both = pair()
    _, request = both.new(prompt(18), max_new=4)
    while not both.ready():
        both.round()
    both.transfer("r0")
    batch = both.decode.round().batch
    assert batch is not None
    assert (batch.starts.tolist(), batch.counts.tolist()) == ([18], [1])
    assert batch.input_ids.tolist() == request.out[:1]
    batch = both.decode.round().batch
    assert batch is not None
    assert batch.input_ids.tolist() == [FROM_DEVICE]


def test_what_a_decode_node_has_in_its_cache_is_not_sent_again() -> None:
    both = pair()
    both.new(prompt(18), max_new=2)
    both.run()
    both.new(prompt(18) + prompt(6, seed=5), max_new=3)
    while not both.ready():
        both.round()
    stream = both.decode.streams["r1"]
    assert stream.start >= 16
    assert stream.pages[0].blocks == both.decode.rig.blocks(both.decode.rig.requests[1])[stream.start // 4 :]
    both.run()
    both.check()


@pytest.mark.contract("SP-26", "SP-30", "SP-31")
def test_streams_need_no_batch_slot_and_go_out_beside_a_full_batch_or_without_one() -> None:
    both = pair(max_num_seqs=3, max_batched_tokens=3, chunk_tokens=3, num_pages=65)
    both.new(prompt(5), max_new=20)
    both.new(prompt(5, seed=1), max_new=20)
    while len(both.ready()) < 2:
        both.round()
    for rid in both.ready():
        both.transfer(rid)
    both.decode.round()
    both.decode.rig.new(prompt(7, seed=2), max_new=3)
    plan = both.decode.round()
    assert plan.batch is not None
    (stream,) = plan.remote_prefill
    # The model's part says nothing of it.
    assert stream.row not in plan.batch.rows.tolist()
    assert plan.batch.num_tokens == len(plan.batch.rows) == 2
    idle = build(role=Role.DECODE)
    idle.new(prompt(7))
    plan = idle.plan()
    assert plan.batch is None
    assert plan.needs_device()
    # On the other node, beside a forward that has no room for another token.
    sending = build(role=Role.PREFILL, max_batched_tokens=8, chunk_tokens=8)
    for seed in range(2):
        sending.new(prompt(8 + 24 * seed, seed=seed), max_new=3)
    sending.round()
    plan = sending.plan()
    assert plan.batch is not None
    assert plan.batch.num_tokens == 8
    assert [other.row for other in plan.remote_decode] == [sending.requests[0].row]
    assert plan.batch.rows.tolist() == [sending.requests[1].row]


@pytest.mark.contract("SP-29", "SP-34")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompts_kv_goes_out_with_the_plan_after_its_last_chunks_result(depth: int) -> None:
    rig = build(role=Role.PREFILL, overlap_schedule_depth=depth, chunk_tokens=8)
    request = rig.new(prompt(20), max_new=9)
    other = rig.new(prompt(40, seed=1), max_new=9)
    while rig.scheduler.life.of(request.row) is not State.PREFILL_DONE:
        assert rig.plan().remote_decode == ()
        if rig.scheduler.life.of(request.row) is not State.PREFILL_DONE:
            rig.land(down_to=depth)
    # Scheduled, in flight: another plan goes out ahead of the result, without a drain.
    for _ in range(depth):
        plan = rig.plan()
        assert plan.remote_decode == ()
        assert plan.batch is not None
        assert plan.batch.rows.tolist() == [other.row]
    rig.land(down_to=depth)
    (stream,) = rig.plan().remote_decode
    assert stream.row == request.row
    assert stream.pages[0].blocks == rig.blocks(request)
    assert rig.scheduler.life.of(request.row) is State.HANDOFF
    rig.land()
    assert len(request.out) == 1


@pytest.mark.contract("SP-60")
def test_a_prefill_node_reserves_no_room_beyond_the_prompt() -> None:
    rig = build(role=Role.PREFILL, overlap_schedule_depth=1)
    assert rig.config.ahead_tokens == 0
    request = rig.new(prompt(16), max_new=100)
    rig.round()
    assert len(rig.blocks(request)) == 4


def test_pages_of_a_hand_off_stay_until_the_transfer_has_ended_and_are_found_afterwards() -> None:
    rig = build(role=Role.PREFILL)
    side = Side(rig)
    request = rig.new(prompt(16), max_new=9)
    while not side.streams:
        side.round()
    blocks = rig.blocks(request)
    for _ in range(3):
        side.round()
        assert rig.blocks(request) == blocks
    rig._finish(request, Finish.LENGTH)
    side.done("r0")
    assert rig.scheduler.active_lcm_blocks() == 0
    rig.round()
    assert request.retired
    again = rig.new(prompt(16), max_new=9)
    rig.round()
    assert int(rig.table.schedule.cached[again.row]) == 15


@pytest.mark.contract("SP-54", "PD-23")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("ok", [True, False])
def test_an_abort_in_a_transfer_returns_pages_only_when_that_has_stopped(role: Role, ok: bool) -> None:
    rig = build(role=role, num_pages=10)
    side = Side(rig)
    request = rig.new(prompt(20), max_new=9)
    while not side.streams:
        side.round()
    blocks = set(rig.blocks(request))
    rig.abort(request)
    rig.abort(request)
    newcomer = rig.new(prompt(18, seed=1), max_new=2)
    for _ in range(4):
        plan = side.round()
        assert request.row not in plan.retired
        assert blocks <= set(rig.scheduler.snapshot().references)
        assert not set(rig.blocks(newcomer)) & blocks
        assert rig.scheduler.sizes().finishing == 1
    side.done("r0", ok=ok)
    plan = side.round()
    assert plan.retired == (request.row,)
    assert plan.aborts == ()
    assert rig.blocks(newcomer)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_failed_transfer_ends_its_request_with_an_error_in_the_next_plan(role: Role, frozen: bool) -> None:
    rig = build(role=role)
    side = Side(rig)
    request = rig.new(prompt(20), max_new=9)
    while not side.streams:
        side.round()
    side.done("r0", ok=False)
    assert rig.scheduler.active_lcm_blocks() == 0
    if role is Role.DECODE:
        # What did not arrive whole is not there to be found.
        assert rig.scheduler.snapshot().index == {}
    if frozen:
        rig.permit(forward=False)
    plan = side.round()
    assert [abort.row for abort in plan.aborts] == [request.row]
    assert "prompt" in plan.aborts[0].reason
    assert plan.retired == (request.row,)
    assert request.finish is Finish.ABORT
    rig.permit(forward=True)
    rig.check_idle()


def test_a_client_that_left_after_the_failure_is_told_nothing() -> None:
    rig = build(role=Role.DECODE)
    side = Side(rig)
    request = rig.new(prompt(20), max_new=9)
    side.round()
    side.done("r0", ok=False)
    rig.abort(request)
    plan = side.round()
    assert plan.aborts == ()
    assert plan.retired == (request.row,)


def test_a_bootstrap_token_that_ends_the_request_leaves_its_prompt_in_the_cache() -> None:
    both = pair()
    both.new(prompt(17), max_new=1)
    both.run()
    (request,) = both.decode.rig.requests
    assert (request.finish, request.forwards) == (Finish.LENGTH, 0)
    both.new(prompt(17), max_new=2)
    both.run()
    assert both.decode.rig.requests[1].out
    both.check()


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "done", "landed"])
def test_an_abort_on_the_prefill_node_before_the_stream_ends_at_once_or_with_its_forward(moment: str) -> None:
    rig = build(role=Role.PREFILL, overlap_schedule_depth=1, chunk_tokens=8)
    request = rig.new(prompt(14), max_new=9)
    if moment != "waiting":
        rig.plan()
    if moment in ("done", "landed"):
        rig.plan()
        assert rig.scheduler.life.of(request.row) is State.PREFILL_DONE
    if moment == "landed":
        rig.land()
    rig.abort(request)
    rig.land()
    plan = rig.plan()
    assert plan.remote_decode == ()
    assert plan.retired == (request.row,)
    rig.check_idle()


def test_hand_offs_are_not_starved_by_a_stream_of_prompts() -> None:
    rig = build(role=Role.PREFILL, max_num_seqs=4, chunk_tokens=8, max_batched_tokens=8, max_model_len=64)
    side = Side(rig)
    for at in range(40):
        while rig.scheduler.sizes().waiting < 3:
            rig.new(prompt(20, seed=len(rig.requests)), max_new=2)
        done = [row for row in rig.scheduler.life.rows(State.PREFILL_DONE) if not rig.scheduler.life.flying(row)]
        streams = {stream.row for stream in side.round().remote_decode}
        assert streams == set(done), at
        for rid in tuple(side.streams):
            rig._finish(rig.by_row[side.streams[rid].row], Finish.LENGTH)
            side.done(rid)


def test_a_retracted_request_of_a_decode_node_is_recomputed_there() -> None:
    both = pair(num_pages=12, max_num_seqs=2, resume_headroom_tokens=0)
    for seed in range(2):
        both.new(prompt(14, seed=seed), max_new=20)
    both.run()
    assert sum(request.preempted for request in both.decode.rig.requests) > 0
    both.check()


def test_events_of_transfers_that_are_not_open_are_broken_invariants() -> None:
    for role in (Role.PREFILL, Role.DECODE):
        rig = build(role=role)
        request = rig.new(prompt(8))
        with pytest.raises(InvariantBroken, match="not open"):
            rig.scheduler.advance([TransferDone(row=request.row, ok=True)])
    rig = build(role=Role.DECODE)
    request = rig.new(prompt(8))
    rig.round()
    with pytest.raises(InvariantBroken, match="bootstrap"):
        rig.scheduler.advance([TransferDone(row=request.row, ok=True)])


def test_of_a_window_only_what_the_first_decode_sees_is_sent_and_found_later() -> None:
    groups = (
        CacheGroupSpec(name="near", kind="window", block_tokens=4, window_tokens=3, blocks_per_parent=2),
        CacheGroupSpec(name="far", kind="window", block_tokens=8, window_tokens=9),
    )
    both = pair(groups=groups)
    both.new(prompt(26), max_new=2)
    while not both.ready():
        both.round()
    for side in (both.prefill, both.decode):
        # The query at position 26 sees 24, 25 of the one group and 18 .. 25 of the other.
        assert [len(pages.blocks) for pages in side.streams["r0"].pages] == [1, 2]
    both.run()
    # A beginning of it: its window came over from nobody.
    both.new(prompt(18) + prompt(4, seed=5), max_new=4)
    both.new(prompt(26), max_new=4)
    both.run()
    both.check()
