"""Memory really goes back to the machine, and a stop ends what a pause or a release holds back."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import attrs
import httpx
import pytest
import torch
from ops_rig import greedy, hand_rank, tiny_settings
from ops_server import ops_server

from tokenspeed.device.give_back import give_back
from tokenspeed.plane.messages import FlushCacheOp, PauseMode, PauseOp, ResumeOp
from tokenspeed.plane.operations import ReleaseMemoryOp, ResumeMemoryOp
from tokenspeed.plane.results import AllBlocksCleared
from tokenspeed.testing import RecordingSink

MIB = 1 << 20
PROMPT = list(range(1, 40))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_inside_a_region_are_freed_and_its_neighbours_keep_theirs() -> None:
    whole = torch.ones(64 * MIB, dtype=torch.uint8)
    before = resident_bytes()
    part = whole[100 : 60 * MIB]
    freed = give_back(part)
    assert freed >= 59 * MIB
    assert before - resident_bytes() > 50 * MIB
    assert int(whole[:100].sum()) == 100
    assert int(whole[60 * MIB :].sum()) == 4 * MIB
    assert int(part.sum()) <= 2 * mmap.PAGESIZE
    assert give_back(torch.ones(8)) == 0


@pytest.mark.contract("CP-7", "CP-9")
def test_a_release_empties_the_pool_and_drops_the_weights_and_the_resume_restores_the_tokens() -> None:
    settings = tiny_settings(pool_tokens=64 * 1024)
    with hand_rank(settings) as rank:
        before = rank.run(greedy("a", PROMPT))
        assert rank.call(ReleaseMemoryOp).success
        asleep = resident_bytes()
        assert rank.call(ResumeMemoryOp).success
        assert rank.run(greedy("b", PROMPT)) == before
        # Pages come back one by one where they are written, not all 32 MiB of them at the resume.
        assert resident_bytes() - asleep < 24 * MIB


def test_flushes_at_once_and_under_a_pause_are_all_answered_and_clear_once_each() -> None:
    sink = RecordingSink()
    with hand_rank(kv_sink=sink) as rank:
        rank.run(greedy("a", PROMPT))
        calls = [rank.start(FlushCacheOp, timeout_s=1.0) for _ in range(2)]
        assert [rank.answer(call).success for call in calls] == [True, True]
        rank.settle()
        rank.call(PauseOp, mode=PauseMode.WAIT)
        rank.put(greedy("held", PROMPT))
        rank.rounds(1)
        assert rank.call(FlushCacheOp).success
        assert rank.call(ResumeOp).success
        rank.settle()
        assert len(rank.link.tokens("held")) == 8
        assert rank.cached("held") == 0
    cleared = [event for batch in sink.batches for event in batch if isinstance(event, AllBlocksCleared)]
    assert 1 <= len(cleared) <= 3


@pytest.mark.parametrize("state", ["pause", "sleep"])
def test_a_stop_ends_what_is_held_back_with_abort_after_the_shutdown_timeout(state: str) -> None:
    settings = tiny_settings()
    settings = attrs.evolve(settings, server=attrs.evolve(settings.server, shutdown_timeout_s=0.3))
    with ops_server(settings) as server:
        server.call(state)
        answers: list[httpx.Response] = []
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/generate", json=body, timeout=30))
        )
        asking.start()
        while server.user.get("/load").json()["server_load"] == 0:
            os.sched_yield()
        server.frontend.stop()
        server.served.join(30)
        asking.join(30)
        assert not server.served.is_alive()
        assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
