"""Scheduler, event loop, data plane, executor, host tier and real streams together, under memory pressure.

Copies take a random time to begin, so that acknowledgments are late and copies of several plans pile
up; the tokens must be those of a run without any pressure.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import pytest
from device_doubles import CountingWakeup, background
from host_rig import PAGE_TOKENS, SPECS, HostRig, host_rig, layered_tokens
from rig import Rig, hand_rig, request

from tokenspeed.compose.control import ControlContainer
from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.kv.host_cache import HostCacheExecutor
from tokenspeed.device.step import LayersReady
from tokenspeed.plane.plan import LoadBackOp, RestoreOp, SnapshotOp, WriteBackOp
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import CacheAcks
from tokenspeed.settings.model import CacheSettings, Retraction, SchedulerSettings, Settings, WritePolicy
from tokenspeed.testing import RecordingLink

TIGHT = attrs.evolve(
    SPECS, num_pages=26, host_parents=40, images=3, max_num_seqs=6, max_batched_tokens=32, max_model_len=64
)


@attrs.frozen(eq=False)
class CountingTier:
    """A `HostTier` in front of the real one; counts what it is asked for."""

    inner: HostCacheExecutor
    asked: Counter[str] = attrs.field(factory=Counter)

    def store(self, ops: tuple[WriteBackOp | SnapshotOp, ...]) -> None:
        for op in ops:
            ordered = isinstance(op, WriteBackOp) and op.stream_ordered
            self.asked[f"{'ordered ' if ordered else ''}{type(op).__name__}"] += 1
        self.inner.store(ops)

    def load(self, ops: tuple[LoadBackOp | RestoreOp, ...]) -> LayersReady:
        self.asked.update(type(op).__name__ for op in ops)
        return self.inner.load(ops)

    def notify(self, wakeup: Wakeup) -> None:
        self.inner.notify(wakeup)

    def acks(self) -> CacheAcks:
        acks = self.inner.acks()
        self.asked["acknowledged"] += len(acks)
        return acks

    def flush(self) -> None:
        self.inner.flush()

    def memory(self) -> tuple:
        return ()

    def shutdown(self) -> None:
        self.inner.shutdown()


@attrs.frozen(eq=False)
class TierRank:
    rig: Rig
    host: HostRig
    tier: CountingTier
    wakeup: CountingWakeup


@contextmanager
def tier_rank(executor: str, settings: Settings) -> Iterator[TierRank]:
    with host_rig(executor=executor, specs=TIGHT) as host:
        tier, wakeup, draw = CountingTier(host.tier), CountingWakeup(), random.Random(7)
        for stream in (host.backend.write_stream, host.backend.load_stream):
            stream.delay_s = lambda: draw.choice((0.0, 0.0, 0.001, 0.004))
        plane = open_data_plane(attrs.evolve(host.handle, host_tier=tier), wakeup, check=Strict())
        try:
            yield TierRank(hand_rig(specs=TIGHT, settings=settings, plane=plane), host, tier, wakeup)
        finally:
            plane.close()


def drive(rank: TierRank, prompts: dict[str, list[int]], lengths: dict[str, int], draw: random.Random) -> None:
    """Requests arrive at random rounds."""
    waiting = list(prompts)
    while waiting or rank.rig.loop.table.live:
        for rid in [waiting.pop() for _ in range(min(len(waiting), draw.randint(0, 2)))]:
            rank.rig.put(request(rid, prompts[rid], max_new=lengths[rid]))
        seen = rank.wakeup.count
        if not rank.rig.loop.round():
            with rank.wakeup.changed:
                rank.wakeup.changed.wait_for(lambda seen=seen: rank.wakeup.count > seen, 0.05)


def settings(*, overlap: bool, policy: WritePolicy, chain: tuple[Retraction, ...]) -> Settings:
    return Settings(
        scheduler=SchedulerSettings(overlap=overlap, chunk_tokens=16, max_waiting=64, retraction=chain),
        cache=CacheSettings(page_tokens=8, host_gib=1.0, write_policy=policy, images=3),
    )


IMAGES = (Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT)
RECOMPUTE = (Retraction.RECOMPUTE, Retraction.ABORT)


@pytest.mark.contract("CT-1", "CT-2", "CT-7", "CT-12", "SP-42", "SP-43", "SP-44", "SP-45")
@pytest.mark.parametrize(
    ("executor", "overlap", "policy", "chain"),
    [
        ("streams", True, WritePolicy.WRITE_THROUGH, IMAGES),
        ("streams", True, WritePolicy.WRITE_BACK, IMAGES),
        ("streams", False, WritePolicy.WRITE_BACK, RECOMPUTE),
        ("futures", True, WritePolicy.WRITE_BACK, IMAGES),
        ("futures", False, WritePolicy.WRITE_THROUGH, IMAGES),
        ("futures", True, WritePolicy.WRITE_THROUGH, RECOMPUTE),
    ],
    ids=lambda value: getattr(value, "value", None) or (value[0].value if isinstance(value, tuple) else str(value)),
)
def test_tokens_under_pressure_are_those_of_a_run_without(
    executor: str, overlap: bool, policy: WritePolicy, chain: tuple[Retraction, ...]
) -> None:
    draw = random.Random(f"{executor} {overlap} {policy} {chain}")
    system = [draw.randrange(1, 97) for _ in range(3 * PAGE_TOKENS + 2)]
    prompts = {
        f"r{i}": system[: draw.choice((0, 4, 9, 14))] + [draw.randrange(1, 97) for _ in range(draw.randint(3, 20))]
        for i in range(18)
    }
    lengths = {rid: draw.randint(8, 28) for rid in prompts}
    with tier_rank(executor, settings(overlap=overlap, policy=policy, chain=chain)) as rank:
        drive(rank, prompts, lengths, draw)
        again = {f"{rid} again": prompt for rid, prompt in list(prompts.items())[:6]}
        drive(rank, again, {rid: lengths[rid.removesuffix(" again")] for rid in again}, draw)
        rank.rig.settle()
        rank.host.watch.until(lambda: settled(rank))
        asked = rank.tier.asked
        got = {rid: rank.rig.link.tokens(rid) for rid in (*prompts, *again)}
        scheduler = rank.rig.loop.scheduler
        assert scheduler.available_lcm_blocks() == scheduler.num_usable_pages
    wanted = {rid: layered_tokens(prompt, lengths[rid]) for rid, prompt in prompts.items()}
    wanted |= {rid: wanted[rid.removesuffix(" again")] for rid in again}
    assert got == wanted
    # No run was vacuous, and every operation was acknowledged.
    assert asked["LoadBackOp"] > 0
    assert (asked["SnapshotOp"] > 0) == (asked["RestoreOp"] > 0) == (chain is IMAGES)
    assert asked["ordered WriteBackOp" if policy is WritePolicy.WRITE_BACK else "WriteBackOp"] > 0
    operations = sum(count for name, count in asked.items() if name != "acknowledged")
    assert asked["acknowledged"] == operations


def settled(rank: TierRank) -> bool:
    """Acknowledgments arrive while nothing else does."""
    rank.rig.loop.round()
    return not rank.rig.loop.cache_ops.open


@attrs.frozen(eq=False)
class RoundCounter(RecordingLink):
    """A frontend's end whose `receive` counts the rounds: each begins with one (RA-6)."""

    rounds: Counter[str] = attrs.field(factory=Counter)

    def receive(self) -> tuple[object, ...]:
        self.rounds["begun"] += 1
        return super().receive()


@pytest.mark.contract("RA-7", "SP-44")
def test_an_engine_that_waits_for_one_held_restore_runs_no_round_until_it_lands() -> None:
    draw = random.Random(3)
    prompts = {f"r{i}": [draw.randrange(1, 97) for _ in range(15)] for i in range(5)}
    chosen = settings(overlap=True, policy=WritePolicy.WRITE_THROUGH, chain=IMAGES)
    with host_rig(specs=TIGHT) as host:
        tier, wakeup, link = CountingTier(host.tier), ThreadWakeup(), RoundCounter()
        plane = open_data_plane(attrs.evolve(host.handle, host_tier=tier), wakeup, check=Strict())
        loop = ControlContainer(settings=chosen, specs=TIGHT, plane=plane, frontend=link, wakeup=wakeup).loop()
        host.backend.load_stream.hold()
        link.put(*(request(rid, prompt, max_new=24) for rid, prompt in prompts.items()))
        with background(loop.run):
            restored = eventually(lambda: tier.asked["RestoreOp"] and len(waiting_of(link, prompts)))
            assert restored
            eventually(lambda: len(waiting_of(link, prompts)) == tier.asked["RestoreOp"])
            begun = quiet(link)
            assert not threading.Event().wait(0.3)
            assert link.rounds["begun"] == begun
            host.backend.load_stream.release()
            eventually(lambda: not waiting_of(link, prompts))
            loop.request_stop()
        plane.close()
        assert {rid: link.tokens(rid) for rid in prompts} == {
            rid: layered_tokens(prompt, 24) for rid, prompt in prompts.items()
        }


def waiting_of(link: RecordingLink, prompts: dict[str, list[int]]) -> list[str]:
    return [rid for rid in prompts if not link.finish(rid)]


def eventually(reached: Callable[[], object]) -> bool:
    """Whether it came true; looked at from outside of the loop, which tells nobody."""
    for _ in range(2000):
        if reached():
            return True
        threading.Event().wait(0.005)
    return False


def quiet(link: RoundCounter) -> int:
    """Rounds begun, once no more are."""
    begun = -1
    while begun != link.rounds["begun"]:
        begun = link.rounds["begun"]
        threading.Event().wait(0.05)
    return begun
