"""Real ranks over a store: what one computes another does not, and nothing that goes wrong there shows in a token."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ops_rig import TIMEOUT_S, HandRank, blob, greedy, hand_rank, oracle, random_tensors, tiny_settings, weights_folder
from stored_ranks import PROMPT, WHOLE_PAGES, come_to_rest, stored_settings

from tokenspeed.compose.storage import StorageNeeds
from tokenspeed.device.attention_build import HostCacheFacts
from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import FlushCacheOp
from tokenspeed.plane.operations import DiskWeights, ReleaseMemoryOp, ResumeMemoryOp, TensorWeights, UpdateWeightsOp
from tokenspeed.testing.storage import MemoryStore

BASE = "random:tiny-llama"
ENGINE = Path(__file__).parents[1] / "support" / "storing_engine.py"


@pytest.fixture(scope="module")
def cold() -> list[int]:
    """Greedy tokens after PROMPT, nothing cached."""
    return oracle(BASE, [PROMPT])[0]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, cold: list[int]) -> dict[str, bytes]:
    """What a store holds after a rank computed PROMPT and stopped."""
    store = MemoryStore()
    with hand_rank(stored_settings(), storage=store) as rank:
        assert rank.run(greedy("a", PROMPT)) == [cold]
        come_to_rest(rank)
    assert store.closed
    return dict(store.values)


@pytest.fixture
def store(filled: dict[str, bytes]) -> Iterator[MemoryStore]:
    """Filled; opens at the end, so that no worker hangs."""
    store = MemoryStore(values=dict(filled))
    yield store
    store.open.set()


def from_storage(rank: HandRank, rid: str = "b") -> tuple[list[int], int]:
    """Tokens after PROMPT, and how many of its tokens were not computed."""
    (tokens,) = rank.run(greedy(rid, PROMPT))
    come_to_rest(rank)
    return tokens, rank.cached(rid)


@pytest.mark.contract("CT-19", "CT-24", "SP-33")
@pytest.mark.parametrize(
    ("model", "overlap"), [("tiny-llama", False), ("tiny-llama", True), ("tiny-gemma3", True), ("tiny-hybrid", True)]
)
def test_a_new_engine_gets_from_the_folder_what_an_engine_before_it_computed(
    tmp_path: Path, model: str, overlap: bool
) -> None:
    settings = stored_settings(tmp_path, overlap=overlap, model=model)
    with hand_rank(settings) as rank:
        first, cached = from_storage(rank)
        assert cached == 0
    with hand_rank(settings) as rank:
        again, cached = from_storage(rank)
    assert again == first == oracle(f"random:{model}", [PROMPT])[0]
    # A state is kept where its prompt was cut into chunks, so that a hit may end before the last whole page.
    assert cached == WHOLE_PAGES if model != "tiny-hybrid" else cached >= WHOLE_PAGES // 2


def test_an_engine_that_is_killed_leaves_what_it_has_stored(tmp_path: Path, cold: list[int]) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    engine = subprocess.Popen(
        [sys.executable, str(ENGINE), str(tmp_path)], stdout=subprocess.PIPE, env=environ, text=True
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline().strip() == str([cold])
        assert engine.stdout.readline().strip() == "stored"
        engine.send_signal(signal.SIGKILL)
    finally:
        engine.kill()
        engine.wait()
        assert engine.stdout is not None
        engine.stdout.close()
    with hand_rank(stored_settings(tmp_path)) as rank:
        assert from_storage(rank) == (cold, WHOLE_PAGES)


def test_only_an_engine_of_the_same_kind_finds_the_pages(store: MemoryStore, cold: list[int]) -> None:
    found = {}
    for name, settings in {
        "same": stored_settings(),
        "other tenant": stored_settings(namespace="mine"),
        "other weights": stored_settings(model="tiny-llama@7"),
    }.items():
        with hand_rank(settings, storage=store) as rank:
            tokens, found[name] = from_storage(rank)
            assert (tokens == cold) == (name != "other weights")
    assert found == {"same": WHOLE_PAGES, "other tenant": 0, "other weights": 0}


@pytest.mark.contract("CP-33", "CP-34")
def test_after_an_update_nothing_of_the_old_weights_is_served_and_equal_weights_share(
    tmp_path: Path, store: MemoryStore, cold: list[int]
) -> None:
    other = weights_folder(tmp_path / "other", random_tensors(7))
    changed = oracle(f"{BASE}@7", [PROMPT])[0]
    tensors = TensorWeights(blobs=(blob(random_tensors(7)),))
    with hand_rank(stored_settings(), storage=store) as rank:
        assert from_storage(rank, "a") == (cold, WHOLE_PAGES)
        assert rank.call(UpdateWeightsOp, source=DiskWeights(path=other)).success
        assert from_storage(rank, "b") == (changed, 0)
        # Back: what was stored under the first weights is right again.
        assert rank.call(UpdateWeightsOp, source=DiskWeights(path=BASE)).success
        assert from_storage(rank, "c") == (cold, WHOLE_PAGES)
        assert rank.call(UpdateWeightsOp, source=tensors).success
        assert from_storage(rank, "d") == (changed, 0)
    # The same content, in another engine and by another name.
    with hand_rank(stored_settings(), storage=store) as rank:
        assert rank.call(UpdateWeightsOp, source=DiskWeights(path=other), version="mine").success
        assert from_storage(rank, "e") == (changed, WHOLE_PAGES)
        assert rank.call(UpdateWeightsOp, source=DiskWeights(path=str(tmp_path / "nothing"))).success is False
        assert from_storage(rank, "f") == (changed, WHOLE_PAGES)


def test_an_engine_that_slept_finds_its_pages_in_storage(store: MemoryStore, cold: list[int]) -> None:
    with hand_rank(stored_settings(), storage=store) as rank:
        from_storage(rank, "a")
        assert rank.call(ReleaseMemoryOp).success
        assert rank.call(ResumeMemoryOp).success
        assert from_storage(rank, "b") == (cold, WHOLE_PAGES)


def test_an_operation_waits_for_what_is_being_stored(cold: list[int]) -> None:
    store = MemoryStore()
    with hand_rank(stored_settings(), storage=store) as rank:
        store.open.clear()
        rank.put(greedy("a", [*PROMPT[:16], 5]))  # shorter than what is looked up
        while "put" not in store.calls:
            rank.round()
            rank.wakeup.wait(0.02)
        call = rank.start(ReleaseMemoryOp)
        rank.rounds(20)
        assert rank.replied(call) is None
        store.open.set()
        assert rank.answer(call).success
    assert store.values


@pytest.mark.contract("CP-38")
def test_a_flush_forgets_storage_too_for_all_who_share_it(store: MemoryStore, cold: list[int]) -> None:
    with hand_rank(stored_settings(), storage=store) as rank:
        assert from_storage(rank, "a") == (cold, WHOLE_PAGES)
        assert rank.call(FlushCacheOp, timeout_s=TIMEOUT_S).success
        assert store.values == {}
        assert from_storage(rank, "b") == (cold, 0)


@pytest.mark.contract("CP-38")
def test_a_flush_that_storage_refuses_changes_nothing_in_the_nearer_tiers(store: MemoryStore, cold: list[int]) -> None:
    with hand_rank(stored_settings(), storage=store) as rank:
        from_storage(rank, "a")
        store.fault = OSError("read-only")
        reply = rank.call(FlushCacheOp)
        assert (reply.success, "read-only" in reply.message) == (False, True)
        asked = len(store.calls)
        tokens, cached = from_storage(rank, "b")
        assert (tokens, cached >= WHOLE_PAGES) == (cold, True)
        assert store.calls[asked:] == []
        store.fault = None


@pytest.mark.contract("SP-33", "CT-21")
def test_a_store_that_hangs_holds_up_no_round_and_its_request_only_for_the_time_limit(
    store: MemoryStore, cold: list[int]
) -> None:
    with hand_rank(stored_settings(), storage=store) as rank:
        store.open.clear()
        rank.put(greedy("asks", PROMPT))
        rank.round()
        assert store.entered.acquire(timeout=TIMEOUT_S)
        # Everybody else is served meanwhile.
        assert rank.run(greedy("short", PROMPT[:20], 40))[0]
        assert rank.link.finish("asks") is None
        store.open.set()
        come_to_rest(rank)
        assert rank.link.tokens("asks") == cold
        assert rank.cached("asks") == WHOLE_PAGES
    hanging = MemoryStore(values=store.values)
    hanging.open.clear()
    with hand_rank(stored_settings(timeout_s=0.05, shutdown_s=0.0), storage=hanging) as rank:
        assert rank.run(greedy("asks", PROMPT)) == [cold]
        assert rank.cached("asks") == 0
        hanging.open.set()


@pytest.mark.contract("DP-30")
@pytest.mark.parametrize("stored", [False, True])
def test_what_the_build_says_of_host_memory_is_used_up_by_the_start(stored: bool) -> None:
    settings, parts = (stored_settings(), {"storage": MemoryStore()}) if stored else (tiny_settings(), {})
    with hand_rank(settings, **parts):
        gc.collect()
        assert [item for item in gc.get_objects() if type(item) in (HostCacheFacts, StorageNeeds)] == []


class Faulty(MemoryStore):
    """Whatever a store can do wrong, by chance."""

    dice = random.Random(0)

    def exists(self, keys):
        if self.dice.random() < 0.1:
            raise OSError("exists")
        return [there != (self.dice.random() < 0.05) for there in super().exists(keys)]

    def get(self, keys, frames):
        if self.dice.random() < 0.1:
            raise RuntimeError("get")
        found = super().get(keys, frames)
        for at, frame in enumerate(frames):
            chance = self.dice.random()
            if chance < 0.1:
                frame[self.dice.randrange(len(frame))] ^= 1 << self.dice.randrange(8)
            elif chance < 0.15:
                frame[:] = frames[at - 1]
            elif chance < 0.2:
                found[at] = not found[at]
        return found

    def put(self, keys, frames):
        if self.dice.random() < 0.1:
            raise ValueError("put")
        super().put(keys, frames)
        for key in keys:
            if self.dice.random() < 0.1:
                self.values[key] = self.values[key][: self.dice.randrange(200)]
        return [self.dice.random() < 0.9 for _ in keys]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3"])
def test_no_fault_of_a_store_shows_in_a_token(model: str) -> None:
    shared = PROMPT[:64]
    prompts = [shared + [(at * 11 + end) % 200 + 3 for at in range(20 + end)] for end in range(4)]
    right = oracle(f"random:{model}", prompts)
    store, hits = Faulty(), 0
    for turn in range(4):
        with hand_rank(stored_settings(model=model), storage=store) as rank:
            # A store that is taken to be down would not be asked any more.
            for patience in (rank.engine.loop.l3.workers.reading, rank.engine.loop.l3.workers.writing):
                patience.state.faults = -1000
            tokens = rank.run(*(greedy(f"r{at}", ids) for at, ids in enumerate(prompts)))
            assert tokens == right, turn
            hits += sum(rank.cached(f"r{at}") > 0 for at in range(len(prompts)))
            come_to_rest(rank)
    assert hits


def test_a_part_and_its_setting_go_together_and_need_a_host_tier(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"storage\.backend: part, while the part `storage` is none"):
        with hand_rank(stored_settings()):
            pass
    with pytest.raises(SettingsError, match=r"storage\.backend: files, while the part `storage` is a MemoryStore"):
        with hand_rank(stored_settings(tmp_path), storage=MemoryStore()):
            pass
    with pytest.raises(SettingsError, match="part 'storage' does not fit StorageBackend"):
        with hand_rank(stored_settings(), storage=object()):
            pass
