"""Load reports, heartbeats and the sleep of an idle loop."""

from __future__ import annotations

import threading

import attrs
import pytest
from rig import ScriptedScheduler, hand_rig, request

from tokenspeed.control.load import Load
from tokenspeed.control.wakeup import MonotonicClock, ThreadWakeup
from tokenspeed.plane.messages import LoadReport
from tokenspeed.plane.results import Sizes
from tokenspeed.testing import RecordingLink, ScriptedPlane


@attrs.define(eq=False)
class Walked(ScriptedScheduler):
    walks: int = 0
    active: int = 5

    def active_lcm_blocks(self) -> int:
        self.walks += 1
        return self.active

    def empty_lcm_blocks(self) -> int:
        return self.num_usable_pages - 20


@pytest.mark.contract("KM-20", "FW-30")
def test_the_walk_over_live_tables_is_taken_at_most_once_in_100_ms() -> None:
    scheduler, load = Walked(), Load()
    running = Sizes(decoding=2)
    reports = [load.snapshot(scheduler, running, now_s=1.0 + i / 1000) for i in range(100)]
    assert scheduler.walks == 1
    assert {report.active_blocks for report in reports} == {5}
    scheduler.active = 6
    assert load.snapshot(scheduler, running, now_s=1.0999).active_blocks == 5
    assert load.snapshot(scheduler, running, now_s=1.1001).active_blocks == 6


@pytest.mark.contract("KM-21", "KM-22")
def test_a_round_without_requests_counts_anew_and_its_count_is_not_kept() -> None:
    scheduler, load = Walked(), Load()
    load.snapshot(scheduler, Sizes(decoding=1), now_s=1.0)
    scheduler.active = 0
    assert load.snapshot(scheduler, Sizes(), now_s=1.01).active_blocks == 0
    scheduler.active = 9
    assert load.snapshot(scheduler, Sizes(decoding=1), now_s=1.02).active_blocks == 9


def test_a_report_is_made_anew_when_something_it_says_has_changed() -> None:
    scheduler, load = Walked(), Load()
    first = load.snapshot(scheduler, Sizes(decoding=1), now_s=1.0)
    assert load.snapshot(scheduler, Sizes(decoding=1), now_s=1.01) is first
    assert load.snapshot(scheduler, Sizes(decoding=1, suspended=2), now_s=1.02).waiting == 2
    scheduler.active = 7
    assert load.snapshot(scheduler, Sizes(decoding=1, suspended=2), now_s=1.2).active_blocks == 7
    scheduler.num_usable_pages = 90
    assert load.snapshot(scheduler, Sizes(decoding=1, suspended=2), now_s=1.21).total_blocks == 90
    assert first == LoadReport(running=1, waiting=0, resident_blocks=20, active_blocks=5, total_blocks=64)


@pytest.mark.contract("FW-24", "FW-25", "FW-26", "KM-15")
def test_every_output_carries_the_load_of_the_rounds_end() -> None:
    rig = hand_rig(overlap=False)
    rig.put(request("a", 20, max_new=3), request("b", 20, max_new=1))
    rig.settle()
    with_rows = [sent for sent in rig.link.sent if sent.rids]
    assert all(sent.load is not None for sent in with_rows)
    last = rig.link.sent[-1].load
    assert last is not None
    assert (last.running, last.waiting, last.active_blocks, last.total_blocks) == (0, 0, 0, 64)
    first = with_rows[0].load
    assert first is not None
    assert first.running == 1
    assert first.resident_blocks >= first.active_blocks > 0


@pytest.mark.contract("FW-23", "FW-27", "FW-28")
def test_a_changed_load_without_tokens_is_sent_in_an_empty_message() -> None:
    scheduler = ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.rounds(3)
    assert len(rig.link.sent) == 1
    scheduler.counts = Sizes(waiting=1)
    rig.rounds(3)
    assert [sent.load.waiting for sent in rig.link.sent if sent.load] == [0, 1]
    assert all(not sent.rids for sent in rig.link.sent)


@pytest.mark.contract("FW-29")
def test_quiet_seconds_bring_one_heartbeat_each_and_no_round() -> None:
    @attrs.define(eq=False)
    class Quiet:
        """Sleeps by moving the clock; wakes after five seconds."""

        def set(self) -> None:
            return None

        def wait(self, timeout_s: float | None) -> bool:
            assert timeout_s is not None
            rig.clock.advance(max(timeout_s, 0.001))
            return rig.clock.now_s() > 6.0

    rig = hand_rig()
    rig.loop.round()
    loop = attrs.evolve(rig.loop, wakeup=Quiet())
    before, plans = len(rig.link.sent), rig.loop.scheduler
    loop._sleep()
    beats = rig.link.sent[before:]
    assert 4 <= len(beats) <= 6
    assert all(beat.load == LoadReport(total_blocks=64) for beat in beats)
    assert plans.sizes().held == 0


@attrs.define(eq=False)
class CountedScheduler(ScriptedScheduler):
    rounds: int = 0
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def drain_kv_events(self) -> tuple[()]:
        with self.changed:
            self.rounds += 1
            self.changed.notify_all()
        return ()


@pytest.mark.contract("RA-7")
def test_an_idle_loop_runs_no_round_until_something_arrives_and_then_at_once() -> None:
    scheduler, wakeup, link = CountedScheduler(), ThreadWakeup(), RecordingLink()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    loop = attrs.evolve(rig.loop, wakeup=wakeup, frontend=link, clock=MonotonicClock())
    thread = threading.Thread(target=loop.run, name="ts-control")
    thread.start()
    try:
        with scheduler.changed:
            assert scheduler.changed.wait_for(lambda: scheduler.rounds == 1, timeout=5)
        for expected in (2, 3, 4):
            wakeup.set()
            with scheduler.changed:
                assert scheduler.changed.wait_for(lambda want=expected: scheduler.rounds == want, timeout=5)
        with scheduler.changed:
            assert not scheduler.changed.wait_for(lambda: scheduler.rounds > 4, timeout=0.3)
    finally:
        loop.request_stop()
        thread.join(5)
    assert not thread.is_alive()


@pytest.mark.contract("SS-12", "FW-5")
def test_a_stop_or_a_vanished_frontend_ends_the_loop_at_the_end_of_a_round() -> None:
    for end in ("stop", "gone"):
        rig = hand_rig()
        rig.put(request("a", 3, max_new=200))
        rig.rounds(3)
        if end == "stop":
            rig.loop.request_stop()
        else:
            rig.link.gone = True
        rig.loop.run()
        assert rig.loop.state.stopped
