"""Pauses, resumes and flushes: the state machine alone, and through whole rounds."""

from __future__ import annotations

import pytest
from rig import ScriptedScheduler, hand_rig, request

from tokenspeed.control.control_ops import ControlOps, Phase
from tokenspeed.plane.messages import (
    AbortRequest,
    Finish,
    FlushCacheOp,
    PauseMode,
    PauseOp,
    ResumeOp,
    UnsupportedOp,
)
from tokenspeed.testing import ScriptedPlane


class NothingHeld:
    def describe(self, *, now_s: float) -> dict[str, object]:
        return {}


def pause(call_id: int, mode: PauseMode) -> PauseOp:
    return PauseOp(call_id=call_id, mode=mode)


@pytest.mark.contract("PT-23")
def test_the_pause_state_machine_joins_escalates_and_refuses() -> None:
    ops = ControlOps(max_buffered=4, state_dump=NothingHeld())

    def send(*messages: object) -> list[tuple[int, bool]]:
        ops.route(messages, now_s=0.0)  # type: ignore[arg-type]
        return [(reply.call_id, reply.success) for reply in ops.take_replies()]

    assert send(pause(1, PauseMode.WAIT)) == []
    assert send(pause(2, PauseMode.WAIT)) == []
    assert send(pause(3, PauseMode.ABORT)) == []
    ops.resolve(drained=False, empty=lambda: True)
    assert ops.take_replies() == ()
    ops.resolve(drained=True, empty=lambda: True)
    assert [(r.call_id, r.success) for r in ops.take_replies()] == [(1, True), (2, True), (3, True)]
    assert send(pause(4, PauseMode.ABORT)) == [(4, True)]
    assert send(pause(5, PauseMode.KEEP)) == [(5, False)]
    assert send(ResumeOp(call_id=6)) == [(6, True)]
    assert send(pause(7, PauseMode.KEEP)) == [(7, True)]
    assert send(pause(8, PauseMode.WAIT)) == [(8, False)]
    assert ops.state.phase is Phase.FROZEN
    assert send(ResumeOp(call_id=9), pause(10, PauseMode.WAIT), ResumeOp(call_id=11)) == [
        (9, True),
        (10, False),
        (11, True),
    ]


@pytest.mark.contract("CP-1", "RA-9")
def test_pause_abort_ends_what_runs_and_answers_once_drained() -> None:
    rig = hand_rig()
    rig.put(request("a", 5, max_new=50), request("b", 40, max_new=50))
    rig.rounds(2)
    rig.put(pause(1, PauseMode.ABORT))
    rig.settle()
    assert [(rig.link.finish(rid) or (0,))[0] for rid in "ab"] == [Finish.ABORT] * 2
    assert [(r.call_id, r.success) for r in rig.link.replies] == [(1, True)]


@pytest.mark.contract("CP-2", "CP-4", "IS-5")
def test_pause_wait_lets_requests_finish_and_the_resume_admits_what_was_buffered() -> None:
    rig = hand_rig()
    rig.put(request("a", 5, max_new=6))
    rig.rounds(2)
    rig.put(pause(1, PauseMode.WAIT), request("b", 5, max_new=6), request("c", 6, max_new=6))
    rig.settle()
    assert len(rig.link.tokens("a")) == 6
    assert [r.call_id for r in rig.link.replies] == [1]
    assert rig.loop.state.funnelled == 1
    assert rig.link.finish("b") is None
    rig.put(ResumeOp(call_id=2))
    rig.settle()
    assert rig.loop.state.funnelled == 3
    assert [len(rig.link.tokens(rid)) for rid in "bc"] == [6, 6]


@pytest.mark.contract("CP-3", "RA-16", "DO-11")
@pytest.mark.parametrize("overlap", [False, True])
def test_pause_keep_answers_at_once_and_the_streams_go_on_unchanged(overlap: bool) -> None:
    plain = hand_rig(overlap=overlap)
    plain.put(request("a", 5, max_new=12))
    plain.settle()
    rig = hand_rig(overlap=overlap)
    rig.put(request("a", 5, max_new=12))
    rig.rounds(4)
    rig.put(pause(1, PauseMode.KEEP))
    rig.rounds(1)
    assert [r.call_id for r in rig.link.replies] == [1]
    frozen_at = rig.link.tokens("a")
    rig.rounds(10)
    assert rig.link.tokens("a") == frozen_at
    rig.put(ResumeOp(call_id=2))
    rig.settle()
    assert rig.link.tokens("a") == plain.link.tokens("a")


def test_an_abort_while_paused_reaches_both_buffered_and_frozen_requests() -> None:
    rig = hand_rig()
    rig.put(request("a", 5, max_new=12))
    rig.rounds(3)
    rig.put(pause(1, PauseMode.KEEP), request("b", 5))
    rig.rounds(1)
    rig.put(AbortRequest(rids=("a", "b")))
    rig.rounds(2)
    assert (rig.link.finish("a") or (0,))[0] == Finish.ABORT
    assert not rig.loop.control_ops.buffers("b")
    rig.put(ResumeOp(call_id=2))
    rig.settle()
    assert rig.link.tokens("b") == []
    assert rig.loop.scheduler.sizes().held == 0


def test_the_pause_buffer_is_bounded_and_answers_429_beyond() -> None:
    ops = ControlOps(max_buffered=2, state_dump=NothingHeld())
    routed = ops.route((pause(1, PauseMode.WAIT), *(request(f"r{i}", 3) for i in range(3))), now_s=0.0)
    assert routed.requests == ()
    assert [(refusal.rid, refusal.status) for refusal in routed.refusals] == [("r2", 429)]


@pytest.mark.contract("RA-12")
def test_a_flush_clears_when_nothing_holds_pages_and_fails_with_a_reason_when_time_is_over() -> None:
    scheduler = ScriptedScheduler(clears=[False, False, True, False])
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.put(FlushCacheOp(call_id=1, timeout_s=5.0), FlushCacheOp(call_id=2, timeout_s=0.0))
    rig.rounds(2)
    assert rig.link.replies == []
    rig.rounds(2)
    assert [(r.call_id, r.success) for r in rig.link.replies] == [(1, True), (2, False)]
    assert "flush_cache" in rig.link.replies[1].message
    assert rig.plane.names().count("flush_cache") == 1


def test_a_flush_after_the_last_token_succeeds_and_the_prefix_is_forgotten() -> None:
    rig = hand_rig()
    rig.put(request("a", 40, max_new=2))
    rig.settle()
    rig.put(request("b", 40, max_new=2))
    rig.settle()
    assert max(sent.cached_tokens[0] for sent in rig.link.sent if sent.rids == ["b"]) == 32
    rig.put(FlushCacheOp(call_id=1, timeout_s=1.0))
    rig.settle()
    assert [(r.call_id, r.success) for r in rig.link.replies] == [(1, True)]
    rig.put(request("c", 40, max_new=2))
    rig.settle()
    assert max(sent.cached_tokens[0] for sent in rig.link.sent if sent.rids == ["c"]) == 0


def test_an_operation_this_build_lacks_is_answered_by_name() -> None:
    rig = hand_rig()
    rig.put(UnsupportedOp(call_id=3, method="update_weights_from_disk"))
    rig.rounds(1)
    assert [(r.call_id, r.success) for r in rig.link.replies] == [(3, False)]
    assert "update_weights_from_disk" in rig.link.replies[0].message
