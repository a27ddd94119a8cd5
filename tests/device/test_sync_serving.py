"""A rank served with sync debugging armed: nothing waits, and a planted wait is found."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from rig import request

from tokenspeed.compose.engine import RankEngine, rank_engine
from tokenspeed.device.guards import HostSyncDebug
from tokenspeed.device.sampling.base import SampledTokens, Sampler, TokenMasks
from tokenspeed.device.sampling.sampler import batch_sampler
from tokenspeed.device.sync_trap import SWITCH, SyncDebugMode
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import SamplingParams
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array
from tokenspeed.settings.model import (
    Backend,
    CacheSettings,
    DeviceSettings,
    Executor,
    Forward,
    ModelSettings,
    SchedulerSettings,
    Settings,
)
from tokenspeed.testing import RecordingLink

TINY = Settings(model=ModelSettings(source="random:tiny-llama"), device=DeviceSettings(kv_pool_tokens=4096))


def armed(engine: RankEngine) -> HostSyncDebug:
    """Arm without the rest of `enter_serving`, which changes the garbage collection of this process."""
    sync = engine.serving.sync_debug
    assert isinstance(sync, HostSyncDebug)
    sync.arm()
    return sync


def serve(engine: RankEngine, link: RecordingLink, rids: list[str], *, rounds: int) -> None:
    for _ in range(rounds):
        if all(link.finish(rid) for rid in rids):
            return
        engine.loop.round()
    raise AssertionError([rid for rid in rids if not link.finish(rid)])


DEVICES = {
    "native": DeviceSettings(kv_pool_tokens=4096),
    "torch": DeviceSettings(kv_pool_tokens=4096, forward=Forward.TORCH),
    "futures": DeviceSettings(kv_pool_tokens=4096, executor=Executor.FUTURES),
    "synchronous futures": DeviceSettings(kv_pool_tokens=4096, executor=Executor.FUTURES, async_scheduling=False),
    "simulated": DeviceSettings(kv_pool_tokens=4096, backend=Backend.SIMULATED),
}


@pytest.mark.contract("DP-55", "DP-63")
@pytest.mark.parametrize("name", DEVICES)
def test_two_hundred_requests_are_served_without_a_report(name: str) -> None:
    link = RecordingLink()
    settings = attrs.evolve(TINY, device=DEVICES[name], scheduler=SchedulerSettings(max_batched_tokens=64))
    with rank_engine(settings, connect=lambda info, wakeup: link) as engine:
        assert armed(engine).trap.mode is SyncDebugMode.ERROR  # tests run under it, see conftest.py
        rids = [f"r{i}" for i in range(200)]
        drawn = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, frequency_penalty=0.3, ignore_eos=True)
        for i, rid in enumerate(rids):
            more = {"sampling": drawn} if i % 3 == 1 else {}
            if i % 5 == 2:
                more |= {"return_logprob": True, "top_logprobs": 2, "prompt_logprobs": 0}
            link.put(request(rid, 3 + i % 90, max_new=1 + i % 4, **more))
        serve(engine, link, rids, rounds=2000)
        assert [len(link.tokens(rid)) for rid in rids] == [1 + i % 4 for i in range(200)]


@attrs.frozen(eq=False)
class HiddenItem:
    """A sampler that looks at one of its tokens, as nobody should."""

    inner: Sampler

    def seat(self, seat: Seat) -> None:
        self.inner.seat(seat)

    def release(self, slot: int) -> None:
        self.inner.release(slot)

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        sampled = self.inner.sample(logits, slots=slots, positions=positions, masks=masks)
        if sampled.tokens[0].item() < 0:  # hidden
            raise AssertionError
        return sampled


def ended_by_a_wait(settings: Settings, link: RecordingLink) -> None:
    with rank_engine(settings, connect=lambda info, wakeup: link, sampler=hidden_item) as engine:
        link.put(request("before", 3, max_new=2))
        serve(engine, link, ["before"], rounds=50)  # start-up may wait
        armed(engine)
        link.put(request("a", 3, max_new=2))
        serve(engine, link, ["a"], rounds=50)


def hidden_item(*, slots: int, vocab_size: int) -> Sampler:
    return HiddenItem(batch_sampler(slots=slots, vocab_size=vocab_size))


@pytest.mark.contract("DP-55", "DP-60", "DP-61")
@pytest.mark.parametrize("backend", [Backend.CPU, Backend.SIMULATED])
def test_planted_fault_a_hidden_item_raises_where_it_is_and_ends_the_rank(backend: Backend) -> None:
    link = RecordingLink()
    device = attrs.evolve(TINY.device, backend=backend)
    place = r"\.item\(\).*test_sync_serving\.py:\d+ \(HiddenItem\.sample\)"
    with pytest.raises(InvariantBroken, match=place) as caught:
        ended_by_a_wait(attrs.evolve(TINY, device=device), link)
    assert len(link.tokens("before")) == 2
    assert "thread='ts-exec'" in str(caught.value) or backend is Backend.SIMULATED


WARNS = """
import sys
sys.path[:0] = sys.argv[1:]
from test_sync_serving import TINY, hidden_item, request, serve, RecordingLink, rank_engine
import logging
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
link = RecordingLink()
with rank_engine(TINY, connect=lambda info, wakeup: link, sampler=hidden_item) as engine:
    engine.enter_serving()
    link.put(request("a", 3, max_new=40))
    serve(engine, link, ["a"], rounds=100)
print(len(link.tokens("a")), "tokens")
"""


@pytest.mark.contract("DP-59", "DP-61")
def test_by_default_a_rank_that_entered_serving_reports_the_place_once_and_goes_on() -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "support"), str(here.parents[1] / "src")]
    environ = {name: value for name, value in os.environ.items() if name != SWITCH}
    command = [sys.executable, "-c", WARNS, *paths]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environ)
    warnings = [line for line in found.stdout.splitlines() if line.startswith("WARNING") and "waits for" in line]
    assert len(warnings) == 1, found.stdout
    assert "(HiddenItem.sample): .item() waits for the device" in warnings[0]
    assert "40 tokens" in found.stdout


@pytest.mark.contract("DP-62")
def test_the_runner_of_all_tests_sets_error_and_a_task_cannot_relax_it() -> None:
    root = Path(__file__).parents[2]
    script = (root / ".ci" / "run").read_text(encoding="utf-8")
    exported = script.index(f"export {SWITCH}=error")
    assert exported < script.index("\nstage ")
    assert script.count(SWITCH) == 1
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert f"{SWITCH} := error" in makefile  # `:=` of a target is stronger than the environment


@pytest.mark.contract("DP-63")
@pytest.mark.parametrize("source", ["random:tiny-hybrid", "random:tiny-gemma3"])
def test_images_and_loads_of_the_host_tier_are_no_waits_of_a_round(source: str) -> None:
    link = RecordingLink()
    settings = Settings(
        model=ModelSettings(source=source),
        device=DeviceSettings(kv_pool_tokens=512),
        cache=CacheSettings(host_gib=0.05),
    )
    with rank_engine(settings, connect=lambda info, wakeup: link) as engine:
        armed(engine)
        rids = [f"r{i}" for i in range(24)]
        link.put(*(request(rid, 3 + 3 * i, max_new=5) for i, rid in enumerate(rids)))
        serve(engine, link, rids, rounds=900)


def test_no_report_is_hidden_by_the_log_level(caplog: pytest.LogCaptureFixture) -> None:
    link = RecordingLink()
    with caplog.at_level(logging.WARNING), rank_engine(TINY, connect=lambda info, wakeup: link) as engine:
        armed(engine)
        link.put(request("a", 40, max_new=3))
        serve(engine, link, ["a"], rounds=50)
    assert [r for r in caplog.records if "waits for the device" in r.getMessage()] == []
