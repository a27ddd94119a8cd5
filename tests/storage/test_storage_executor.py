"""The storage executor over a store that works, hangs, raises, lies and dies."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from storage_rig import PATIENT_S, StoreRig, facts, storing

from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.plane.operations import DiskWeights
from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.ports import StorageExecutor
from tokenspeed.plane.storage import StorageBackend
from tokenspeed.storage.patience import FAULTS_IN_A_ROW
from tokenspeed.testing.storage import MemoryStore

GET, PUT, QUERY = StorageVerb.GET, StorageVerb.PUT, StorageVerb.QUERY
SHORT_S = 0.05


def named(count: int) -> list[str]:
    return [f"name{at:012d}" for at in range(count)]


def stored(rig: StoreRig, count: int) -> list[str]:
    """Pages of which number i holds i + 1."""
    names = named(count)
    for at in range(count):
        rig.fill(at + 1, at + 1)
    assert rig.put(names, list(range(1, count + 1))) == (True,) * count
    return names


def test_the_store_and_the_executor_meet_their_protocols() -> None:
    store = MemoryStore()
    assert isinstance(store, StorageBackend)
    with storing(store) as rig:
        assert isinstance(rig.workers, StorageExecutor)


@pytest.mark.contract("CT-23")
def test_what_was_put_is_found_and_comes_back_into_other_blocks() -> None:
    with storing(MemoryStore()) as rig:
        names = stored(rig, 5)
        assert rig.query([*names, "another name of 16"]) == (True,) * 5 + (False,)
        assert rig.get([*names, "another name of 16"], list(range(31, 37))) == (True,) * 5 + (False,)
        assert [rig.content(31 + at) for at in range(6)] == [{1}, {2}, {3}, {4}, {5}, {0}]


def test_the_groups_of_a_model_have_names_and_sizes_of_their_own() -> None:
    with storing(MemoryStore()) as rig:
        stored(rig, 2)
        rig.fill(9, 77, group=1)
        assert rig.query(named(2), group=1) == (False, False)
        assert rig.put(named(1), [9], group=1) == (True,)
        assert rig.get(named(1), [20], group=1) == (True,)
        assert rig.content(20, group=1) == {77}
        assert rig.get(named(1), [20]) == (True,)
        assert rig.content(20) == {1}


@pytest.mark.contract("KM-9")
def test_hits_are_counted_in_the_token_spans_of_the_keys_found() -> None:
    with storing(MemoryStore()) as rig:
        stored(rig, 3)
        rig.put(named(1), [1], group=1)
        rig.query(named(5))
        rig.query(named(2), group=1)
        rig.get(named(4), [20, 21, 22, 23])
        rig.look()
        assert (rig.meter.total("queried_tokens"), rig.meter.total("hit_tokens")) == (5 * 4 + 2 * 8, 3 * 4 + 1 * 8)
        assert [rig.meter.total(name) for name in ("stored", "fetched", "failed")] == [4, 3, 1]
        assert rig.meter.total("written_bytes") > 3 * 120
        assert rig.meter.total("read_bytes") > 3 * 120
        assert rig.meter.total("read_s") > 0


@pytest.mark.parametrize("wrong", ["flipped", "short", "long", "empty", "another page"])
def test_a_value_that_is_not_the_page_is_a_miss_and_leaves_the_host_block_alone(wrong: str) -> None:
    store = MemoryStore()
    with storing(store) as rig:
        names = stored(rig, 3)
        first, second, third = sorted(store.values)
        good = store.values[second]
        store.values[second] = {
            "flipped": good[:100] + bytes([good[100] ^ 4]) + good[101:],
            "short": good[:-1],
            "long": good + b"\0",
            "empty": b"",
            "another page": store.values[first],
        }[wrong]
        assert rig.get(names, [31, 32, 33]) == (True, False, True)
        assert [rig.content(block) for block in (31, 32, 33)] == [{1}, {0}, {3}]
        assert third in store.values
        # Whoever computes it next can store it again: it is not there, or of another length and replaced in time.
        assert (second in store.values) == (wrong in ("short", "long", "empty"))


def test_a_store_that_raises_costs_hits_and_is_not_asked_for_ever() -> None:
    store = MemoryStore()
    with storing(store) as rig:
        names = stored(rig, 2)
        store.fault = OSError(5, "input/output error")
        for _ in range(FAULTS_IN_A_ROW):
            assert rig.query(names) == (False, False)
        asked = len(store.calls)
        for _ in range(20):
            assert rig.query(names) == (False, False)
            assert rig.get(names, [31, 32]) == (False, False)
        assert len(store.calls) == asked
        assert rig.content(31) == {0}
        rig.look()
        assert rig.meter.noted[-1].failing
        assert rig.workers.clear().startswith("storage: the store fails")


def test_a_store_that_works_again_is_found_out_by_a_trial_for_which_nobody_waits() -> None:
    store = MemoryStore()
    with storing(store) as rig:
        names = stored(rig, 2)
        store.fault = OSError("gone")
        for _ in range(FAULTS_IN_A_ROW):
            rig.query(names)
        store.fault = None
        asked = len(store.calls)
        # As if the time had passed: the watcher looks at it at each turn.
        rig.workers.reading.state.retry_at_s = 0.0
        woken = rig.workers.watcher.woken
        with woken:
            woken.notify()
            assert woken.wait_for(lambda: not rig.workers.reading.down, PATIENT_S)
        assert store.calls[asked:] == ["exists"]
        assert rig.query(names) == (True, True)
        rig.look()
        assert not rig.meter.noted[-1].failing


def prepared(count: int) -> dict[str, bytes]:
    """What a store holds after an engine put `count` pages there."""
    store = MemoryStore()
    with storing(store) as rig:
        stored(rig, count)
    return store.values


@pytest.mark.parametrize("verb", [QUERY, GET])
def test_a_store_that_hangs_costs_its_time_limit_and_what_it_brings_later_goes_nowhere(verb: StorageVerb) -> None:
    store = MemoryStore(values=prepared(2))
    with storing(store, timeout_s=SHORT_S) as rig:
        store.open.clear()
        op = rig.start(verb, named(2), [31, 32] if verb is GET else None)
        assert rig.outcome(op) == (False, False)
        assert rig.meter.total("late") == 1
        # The host block is another's from here on.
        rig.fill(31, 99)
        store.open.set()
    # Closed: the worker has come back.
    assert rig.content(31) == {99}
    rig.look()
    assert set(rig.done) == {op}


def test_what_arrived_before_the_time_limit_counts() -> None:
    class HangsAtTheSecond(MemoryStore):
        def get(self, keys, frames):
            if "get" in self.calls:
                self.open.clear()
            return super().get(keys, frames)

    big = (np.zeros((8, 1, 3 << 20), dtype=np.uint8), np.zeros((8, 2, 100), dtype=np.uint8))
    source = MemoryStore()
    with storing(source, blocks=big) as rig:
        stored(rig, 2)
    big[0][:] = 0
    store = HangsAtTheSecond(values=source.values)
    with storing(store, blocks=big, threads=1, timeout_s=1.0) as rig:
        assert rig.get(named(2), [3, 4]) == (True, False)
        assert (rig.content(3), rig.content(4)) == ({1}, {0})
        store.open.set()


def test_an_operation_that_is_given_up_ends_at_once_and_touches_its_blocks_no_more() -> None:
    store = MemoryStore(values=prepared(2))
    with storing(store) as rig:
        store.open.clear()
        op = rig.start(GET, named(2), [31, 32])
        assert store.entered.acquire(timeout=PATIENT_S)
        rig.cancel(op)
        rig.until(lambda: rig.cancelled == [op])
        rig.fill(31, 99)
        rig.cancel(op)
        store.open.set()
    assert rig.content(31) == {99}
    rig.look()
    assert (rig.cancelled, rig.done) == ([op], {})


def test_an_operation_that_still_waits_for_a_worker_can_be_given_up() -> None:
    store = MemoryStore(values=prepared(2))
    with storing(store, threads=1) as rig:
        store.open.clear()
        first, second = rig.start(GET, named(1), [31]), rig.start(GET, named(2), [41, 42])
        rig.cancel(second)
        rig.until(lambda: rig.cancelled == [second])
        store.open.set()
        assert rig.outcome(first) == (True,)
    assert rig.content(41) == {0}


def test_reads_are_not_behind_writes() -> None:
    class HangsInPut(MemoryStore):
        def put(self, keys, frames):
            self.open.wait()
            return [False] * len(keys)

        def exists(self, keys):
            return [key in self.values for key in keys]

        def get(self, keys, frames):
            with_gate, self.open = self.open, threading.Event()
            self.open.set()
            try:
                return super().get(keys, frames)
            finally:
                self.open = with_gate

    store = HangsInPut(values=prepared(2))
    store.open.clear()
    with storing(store) as rig:
        op = rig.start(PUT, ["x" * 16], [5])
        assert rig.query(named(2)) == (True, True)
        assert rig.get(named(2), [31, 32]) == (True, True)
        store.open.set()
        assert rig.outcome(op) == (False,)


def test_the_queues_are_bounded_and_their_pressure_is_told() -> None:
    store = MemoryStore()
    with storing(store, threads=1) as rig:
        store.open.clear()
        puts = [rig.start(PUT, [f"{op}.{at:09d}" for at in range(60)], [1] * 60) for op in range(17)]
        rig.look()
        assert rig.pressure > 0.99
        over = rig.start(PUT, named(60), [1] * 60)
        assert rig.outcome(over) == (False,) * 60
        rig.start(QUERY, [f"a{at:012d}" for at in range(60_000)])
        over = rig.start(QUERY, [f"b{at:012d}" for at in range(60_000)])
        assert rig.outcome(over) == (False,) * 60_000
        store.open.set()
        assert all(all(rig.outcome(op)) for op in puts)
        rig.look()
        assert rig.pressure == 0.0


def test_while_the_store_refuses_writes_no_more_are_asked_for_and_reads_go_on() -> None:
    class Full(MemoryStore):
        def put(self, keys, frames):
            raise OSError(28, "no space left on device")

    store = Full(values=prepared(2))
    with storing(store) as rig:
        for _ in range(FAULTS_IN_A_ROW):
            assert rig.put(["x" * 16], [5]) == (False,)
        rig.look()
        assert rig.pressure == 1.0
        assert rig.get(named(2), [31, 32]) == (True, True)
        # Later it is tried again.
        rig.workers.writing.state.retry_at_s = 0.0
        rig.look()
        assert rig.pressure == 0.0


@pytest.mark.parametrize("answer", [[True], [True] * 9, None, 1])
def test_a_store_that_answers_in_another_form_is_a_miss_and_breaks_nothing(answer: object) -> None:
    class Odd(MemoryStore):
        def exists(self, keys):
            return answer

        def get(self, keys, frames):
            return answer

        def put(self, keys, frames):
            return answer

    with storing(Odd()) as rig:
        assert rig.query(named(3)) == (False,) * 3
        assert rig.get(named(3), [31, 32, 33]) == (False,) * 3
        assert rig.put(named(3), [31, 32, 33]) == (False,) * 3
        assert rig.content(31) == {0}


@pytest.mark.contract("CT-21")
def test_the_store_is_called_on_threads_of_the_executors_own() -> None:
    class Noting(MemoryStore):
        def exists(self, keys):
            names.add(threading.current_thread().name)
            return super().exists(keys)

        def put(self, keys, frames):
            names.add(threading.current_thread().name)
            return super().put(keys, frames)

    names: set[str] = set()
    with storing(Noting(), threads=1) as rig:
        rig.query(stored(rig, 2))
    assert names == {"ts-l3-read-0", "ts-l3-write"}


@pytest.mark.contract("CT-22")
def test_from_the_executor_no_object_of_the_device_side_can_be_reached() -> None:
    with storing(MemoryStore()) as rig:
        seen, todo, modules = set[int](), [rig.workers, rig.workers.start], set[str]()
        while todo:
            value = todo.pop()
            if id(value) in seen or isinstance(value, type) or type(value).__name__ == "module":
                continue
            seen.add(id(value))
            modules.add(type(value).__module__)
            if hasattr(value, "__closure__"):
                todo += [value.__closure__, value.__defaults__]  # and not the globals
            else:
                todo += gc.get_referents(value)
    assert "tokenspeed.storage.pages" in modules
    assert [name for name in modules if name.startswith(("tokenspeed.device", "tokenspeed.scheduler", "torch"))] == []


@pytest.mark.parametrize(
    "op",
    [
        StorageOp(op_id=1, verb=GET, keys=(b"\2\0name",), host_blocks=(1,)),
        StorageOp(op_id=1, verb=GET, keys=(b"\0\0name",), host_blocks=(0,)),
        StorageOp(op_id=1, verb=PUT, keys=(b"\0\0name",), host_blocks=(64,)),
        StorageOp(op_id=1, verb=PUT, keys=(b"\0\0name",)),
    ],
    ids=["no such group", "null block", "beyond the tier", "no block"],
)
def test_an_operation_outside_the_host_tier_is_refused(op: StorageOp) -> None:
    with storing(MemoryStore()) as rig, pytest.raises(InvariantBroken):
        rig.workers.submit([op])


def test_a_flush_deletes_what_is_stored_under_these_weights_and_nothing_else() -> None:
    store = MemoryStore()
    with storing(store) as rig, storing(store, payload=facts(tenant="other")) as other:
        names = stored(rig, 2)
        stored(other, 2)
        assert rig.workers.clear() == ""
        assert rig.query(names) == (False, False)
        assert other.query(names) == (True, True)


def test_a_flush_of_a_store_that_hangs_or_fails_is_refused_in_bounded_time() -> None:
    store = MemoryStore()
    with storing(store, timeout_s=SHORT_S) as rig:
        store.open.clear()
        assert "did not delete its pages within 0.05 s" in rig.workers.clear()
        store.open.set()
        store.fault = OSError("read-only")
        rig.until(lambda: "did not" not in rig.workers.clear())
        assert rig.workers.clear() == "storage: OSError: read-only"


@pytest.mark.contract("CP-33")
def test_other_weights_have_other_pages_and_the_old_ones_are_found_when_they_return() -> None:
    came: list[tuple[object, str]] = []

    def weights_of(source: object, over: str) -> str:
        came.append((source, over))
        return {"there": "v", "back": "w"}[source.path]  # type: ignore[attr-defined]

    with storing(MemoryStore(), weights_of=weights_of) as rig:
        names = stored(rig, 2)
        rig.workers.publish_weights(DiskWeights(path="there"))
        assert rig.query(names) == (False, False)
        assert rig.get(names, [31, 32]) == (False, False)
        rig.fill(7, 50)
        rig.put(names[:1], [7])
        rig.workers.publish_weights(DiskWeights(path="back"))
        assert rig.get(names, [31, 32]) == (True, True)
        assert rig.content(31) == {1}
    assert [over for _, over in came] == ["w", "v"]


def test_an_engine_that_stops_finishes_what_is_being_stored() -> None:
    store = MemoryStore()
    with storing(store) as rig:
        rig.fill(1, 5)
        store.open.clear()
        rig.start(PUT, named(1), [1])
        rig.start(QUERY, named(1))
        assert store.entered.acquire(timeout=PATIENT_S)
        threading.Timer(SHORT_S, store.open.set).start()
    assert len(store.values) == 1
    assert store.closed
    assert [thread for thread in threading.enumerate() if thread.name.startswith("ts-l3")] == []


def test_a_store_that_cannot_be_closed_ends_no_engine_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(MemoryStore):
        def close(self):
            raise RuntimeError("never")

    with storing(Unclosable()) as rig:
        stored(rig, 1)
    assert "the store could not be closed" in caplog.text


def test_a_store_that_takes_no_memory_is_refused_at_the_start() -> None:
    class Detached(MemoryStore):
        def attach(self, memory):
            raise OSError("no memory region is left")

    with pytest.raises(SettingsError, match=r"storage\.backend: part cannot be used: no memory region is left"):
        with storing(Detached()):
            pass
    assert [thread for thread in threading.enumerate() if thread.name.startswith("ts-l3")] == []


def test_an_engine_that_stops_leaves_a_store_that_hangs_behind() -> None:
    store = MemoryStore()
    with storing(store, shutdown_s=0.0) as rig:
        store.open.clear()
        rig.start(PUT, named(1), [1])
        assert store.entered.acquire(timeout=PATIENT_S)
    assert not store.closed
    left = [thread for thread in threading.enumerate() if thread.name.startswith("ts-l3")]
    assert [thread.name for thread in left] == ["ts-l3-write"]
    store.open.set()
    left[0].join(PATIENT_S)
    assert not left[0].is_alive()
    rig.look()
    assert next(iter(rig.done.values())).outcomes == (False,)
