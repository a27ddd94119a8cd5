"""QUERY, GET, PUT and CANCEL: what is planned when, who holds which host block, and how it all ends."""

from __future__ import annotations

import pytest
from shelf_rig import PAGE, StorageRig, storage_rig

from tokenspeed.plane.plan import StorageOp, StorageVerb, int32
from tokenspeed.plane.results import StorageDone, StorageTick
from tokenspeed.scheduler.config import STORAGE_WAIT_S
from tokenspeed.scheduler.host.operations import Store
from tokenspeed.scheduler.names import NAMED_PER_ROUND
from tokenspeed.scheduler.states import Event, State
from tokenspeed.scheduler.storage import NoStorage
from tokenspeed.scheduler.storage_keep import MAX_IN_OP, MAX_OFFERED, MAX_OPEN
from tokenspeed.scheduler.storage_reach import StoredBlock

PROMPT = list(range(1, 5 * PAGE))  # 4 whole pages, and a rest


def verbs(ops: tuple[StorageOp, ...]) -> list[str]:
    return [op.verb.value for op in ops]


def stored(*host_blocks: int) -> Store:
    return Store(group=0, device_blocks=int32(host_blocks), host_blocks=int32(host_blocks), ordered=False)


def written_back(rig: StorageRig, *names: bytes) -> None:
    rig.storage.acked([stored(*(rig.shelf.put(name) for name in names))])


def fetched(rig: StorageRig, row: int, *pages: int) -> StorageOp:
    """The row's GET, in the executor's hands."""
    rig.store(row, *pages)
    rig.round()
    rig.executor.serve()
    (get,) = rig.round()
    assert get.verb is StorageVerb.GET
    return get


@pytest.mark.contract("CT-19", "CT-24", "SP-33")
def test_a_prompt_is_looked_up_then_fetched_and_only_then_waits_to_be_admitted() -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    assert rig.state(row) is State.PREPARING
    rig.store(row, 1, 2)
    (query,) = rig.round()
    assert query.verb is StorageVerb.QUERY
    assert query.keys == tuple(StoredBlock(0, rig.name(row, at)).key for at in (1, 2, 3, 4))
    assert query.host_blocks == ()
    assert rig.round() == ()
    rig.executor.serve()
    (get,) = rig.round()
    assert (get.verb, get.keys) == (StorageVerb.GET, query.keys[:2])
    assert rig.shelf.pinned == set(get.host_blocks)
    assert rig.waiting.head() is None
    rig.executor.serve()
    rig.head()
    assert rig.state(row) is State.WAITING
    assert rig.waiting.head() == row
    assert [rig.shelf.find(0, rig.name(row, at)) for at in (1, 2, 3)] == [*get.host_blocks, None]
    # They stay until the request has taken what it needs of them.
    assert rig.shelf.pinned == set(get.host_blocks)
    rig.storage.admitted(row)
    assert rig.shelf.pinned == set()
    assert rig.plan() == ()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_only_what_nearer_tiers_lack_is_looked_up(tier: str) -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    known = [rig.name(row, at) for at in (1, 2)]
    if tier == "device":
        rig.device.update(known)
    else:
        for name in known:
            rig.shelf.put(name)
    (query,) = rig.round()
    assert query.keys == tuple(StoredBlock(0, rig.name(row, at)).key for at in (3, 4))


def test_a_prompt_that_nearer_tiers_have_whole_or_that_fills_no_block_is_not_looked_up() -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    rig.device.update(rig.name(row, at) for at in (1, 2, 3, 4))
    assert rig.round() == ()
    assert rig.state(row) is State.WAITING
    assert rig.state(rig.submit(PROMPT[:PAGE])) is State.WAITING


def test_misses_and_gaps_and_failures_shorten_the_hit_and_never_lose_the_request() -> None:
    rig = storage_rig()
    nothing = rig.submit(PROMPT, salt=b"a")
    rig.round()
    rig.executor.serve()
    assert rig.round() == ()
    assert rig.state(nothing) is State.WAITING

    gap = rig.submit(PROMPT, salt=b"b")
    get = fetched(rig, gap, 1, 3)
    assert len(get.keys) == 1

    failing = rig.submit(PROMPT, salt=b"c")
    get = fetched(rig, failing, 1, 2, 3)
    rig.executor.finish(get.op_id, True, False, True)
    rig.head()
    assert rig.state(failing) is State.WAITING
    found = [rig.shelf.find(0, rig.name(failing, at)) for at in (1, 2, 3)]
    assert found == [get.host_blocks[0], None, get.host_blocks[2]]
    assert get.host_blocks[1] not in rig.shelf.pinned


@pytest.mark.contract("SP-49")
def test_a_waiting_preparation_hashes_nothing_again() -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    rig.round()
    chain = rig.chains.of(row)
    names = list(chain)
    assert len(names) == 5
    # Reading the tokens is what hashing begins with.
    rig.table.tokens.loose[row] = rig.table.tokens.loose[row][:0]
    for _ in range(100):
        assert rig.round() == ()
    assert rig.chains.of(row) is chain
    assert chain == names


def test_a_long_prompt_is_named_in_slices_while_others_run_and_at_once_when_nothing_does() -> None:
    rig = storage_rig(page_tokens=1)
    prompt = [at % 50 for at in range(2 * NAMED_PER_ROUND + 11)]
    alone = rig.submit(prompt)
    assert verbs(rig.round()) == ["query"]
    rig.executor.serve()
    rig.round()
    # One that computes its prompt: the others' rounds are not to be held up.
    rig.waiting.remove(alone)
    rig.life.move(alone, Event.ADMIT)
    other = rig.submit(prompt, salt=b"x")
    rounds = [verbs(rig.round()) for _ in range(3)]
    assert rounds == [[], [], ["query"]]
    assert len(rig.chains.of(other)) == len(prompt)


@pytest.mark.contract("SP-55")
def test_an_abort_before_the_get_ends_the_request_at_the_next_head() -> None:
    for rounds in (0, 1):
        rig = storage_rig()
        row = rig.submit(PROMPT)
        rig.store(row, 1)
        for _ in range(rounds):
            rig.round()
        rig.storage.abort(row)
        rig.storage.abort(row)
        assert rig.state(row) is State.PREPARING
        rig.head()
        assert rig.state(row) is State.ENDED
        assert verbs(rig.plan()) == ["cancel"] * rounds
        rig.executor.serve()
        assert rig.round() == ()
        assert rig.waiting.head() is None


@pytest.mark.contract("SP-55", "CT-19", "SP-20")
@pytest.mark.parametrize("how", ["cancelled", "served", "failed"])
def test_an_abort_after_the_get_detaches_it_and_its_host_blocks_return_when_it_has_ended(how: str) -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    get = fetched(rig, row, 1, 2)
    rig.storage.abort(row)
    (cancel,) = rig.round()
    assert (cancel.verb, cancel.op_id) == (StorageVerb.CANCEL, get.op_id)
    assert rig.state(row) is State.ENDED
    for _ in range(3):
        assert rig.round() == ()
        assert rig.shelf.pinned == set(get.host_blocks)
        assert rig.storage.busy
    if how == "cancelled":
        rig.executor.cancel(get.op_id)
    else:
        rig.executor.finish(get.op_id, *([how == "served"] * 2))
    rig.head()
    assert rig.shelf.pinned == set()
    assert not rig.storage.busy
    # What arrived whole is good for others.
    assert (rig.shelf.find(0, rig.name(row, 1)) is not None) == (how == "served")


def test_an_operation_that_ends_as_it_is_given_up_gets_no_cancel() -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    get = fetched(rig, row, 1)
    rig.storage.abort(row)
    rig.executor.finish(get.op_id, True)
    assert rig.round() == ()


@pytest.mark.contract("CT-33")
def test_a_frozen_round_plans_cancels_and_no_new_query_get_or_put() -> None:
    rig = storage_rig()
    getting, asking = rig.submit(PROMPT, salt=b"a"), rig.submit(PROMPT, salt=b"b")
    rig.store(getting, 1)
    rig.store(asking, 1)
    rig.round()
    rig.executor.serve()
    gets = rig.round()
    assert verbs(gets) == ["get", "get"]
    new = rig.submit(PROMPT, salt=b"c")
    written_back(rig, b"written back")
    rig.storage.abort(getting)
    (cancel,) = rig.round(forward=False)
    assert (cancel.verb, cancel.op_id) == (StorageVerb.CANCEL, gets[0].op_id)
    assert rig.round(forward=False) == ()
    # What is under way may end meanwhile.
    rig.executor.serve()
    assert rig.round(forward=False) == ()
    assert rig.state(asking) is State.WAITING
    assert rig.state(new) is State.PREPARING
    assert verbs(rig.round()) == ["query", "put"]


def test_without_room_in_the_host_tier_less_is_fetched_or_nothing() -> None:
    for room, fetched_blocks in ((4, 4), (3, 2), (1, 1), (0, 0)):
        rig = storage_rig(host_blocks=room)
        row = rig.submit(PROMPT)
        rig.store(row, 1, 2, 3, 4)
        rig.round()
        rig.executor.serve()
        ops = rig.round()
        assert [len(op.keys) for op in ops] == ([fetched_blocks] if fetched_blocks else [])
        if not ops:
            assert rig.state(row) is State.WAITING


@pytest.mark.parametrize("how", ["served", "failed", "aborted"])
def test_of_two_requests_that_need_the_same_blocks_one_fetches_and_the_other_waits_for_it(how: str) -> None:
    rig = storage_rig()
    first, second = rig.submit(PROMPT), rig.submit(PROMPT)
    rig.store(first, 1, 2)
    rig.round()
    rig.executor.serve()
    (get,) = rig.round()
    for _ in range(3):
        assert rig.round() == ()
    if how == "aborted":
        rig.storage.abort(first)
        rig.round()
        rig.executor.cancel(get.op_id)
    else:
        rig.executor.finish(get.op_id, *([how == "served"] * 2))
    ops = rig.round()
    if how == "served":
        assert ops == ()
        assert [rig.state(first), rig.state(second)] == [State.WAITING] * 2
    else:
        assert verbs(ops) == ["get"]
        assert rig.state(second) is State.PREPARING
        rig.executor.serve()
        rig.head()
        assert rig.state(second) is State.WAITING
    for row in (first, second):
        rig.storage.admitted(row)
    assert rig.shelf.pinned == set()
    assert len(rig.shelf.names) == 2


def test_what_another_request_fetched_meanwhile_is_not_fetched_again() -> None:
    rig = storage_rig()
    rows = [rig.submit(PROMPT), rig.submit(PROMPT)]
    rig.store(rows[0], 1, 2)
    rig.round()
    first, second = sorted(rig.executor.open)
    rig.executor.finish(first)
    rig.round()
    rig.executor.finish(rig.executor.only(StorageVerb.GET).op_id)
    rig.executor.finish(second)
    assert rig.round() == ()
    assert [rig.state(row) for row in rows] == [State.WAITING] * 2


def test_a_request_goes_on_without_storage_when_that_takes_too_long() -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    get = fetched(rig, row, 1)
    rig.executor.now_s = STORAGE_WAIT_S - 1
    assert rig.round() == ()
    rig.executor.now_s = STORAGE_WAIT_S
    (cancel,) = rig.round()
    assert (cancel.verb, cancel.op_id) == (StorageVerb.CANCEL, get.op_id)
    assert rig.state(row) is State.WAITING
    assert rig.shelf.pinned == set(get.host_blocks)
    rig.executor.cancel(get.op_id)
    rig.head()
    assert rig.shelf.pinned == set()


@pytest.mark.contract("CT-19")
def test_what_was_written_back_is_put_and_cannot_be_evicted_until_the_outcome() -> None:
    for ok in (True, False):
        rig = storage_rig()
        written_back(rig, b"a", b"gone", b"b")
        del rig.shelf.names[b"gone"]
        (put,) = rig.round()
        assert put.verb is StorageVerb.PUT
        assert put.keys == (StoredBlock(0, b"a").key, StoredBlock(0, b"b").key)
        assert put.host_blocks == (1, 3)
        assert rig.shelf.pinned == {1, 3}
        assert rig.storage.busy
        assert rig.round() == ()
        rig.executor.finish(put.op_id, ok, ok)
        assert rig.round() == ()
        assert rig.shelf.pinned == set()
        assert not rig.storage.busy


def test_puts_are_limited_by_the_queues_pressure_and_in_number() -> None:
    rig = storage_rig(host_blocks=MAX_OPEN * 2)
    written_back(rig, *(b"%d" % at for at in range(MAX_OPEN + 40)))
    rig.executor.pressure = 1.0
    assert rig.round() == ()
    rig.executor.pressure = 0.9
    (put,) = rig.round()
    assert len(put.keys) == int(MAX_OPEN * 0.1)
    assert rig.round() == ()
    rig.executor.pressure = 0.0
    counts = [sum(len(op.keys) for op in rig.round()) for _ in range(6)]
    assert max(counts) == MAX_IN_OP
    assert sum(counts) + len(put.keys) == MAX_OPEN
    rig.executor.finish(put.op_id)
    assert sum(len(op.keys) for op in rig.round()) == len(put.keys)


def test_what_waits_to_be_put_is_bounded() -> None:
    rig = storage_rig(host_blocks=2)
    written_back(rig, b"old")
    written_back(rig, b"new")
    for _ in range(MAX_OFFERED - 1):
        rig.storage.acked([stored(2)])
    (put,) = rig.round()
    assert put.keys == (StoredBlock(0, b"new").key,)
    assert rig.shelf.pins[2] == 1


def test_completions_that_come_twice_or_of_nothing_change_nothing() -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    get = fetched(rig, row, 1)
    tick = StorageTick(storage=True, completed=(StorageDone(op_id=get.op_id, outcomes=(True,)),), cancelled=(99,))
    for _ in range(2):
        rig.storage.advance(tick, round_id=9)
        assert rig.state(row) is State.WAITING
        assert rig.shelf.pinned == set(get.host_blocks)
    rig.storage.admitted(row)
    rig.storage.admitted(row)
    assert rig.shelf.pinned == set()


def test_clearing_lets_go_of_what_waiting_requests_had_fetched() -> None:
    rig = storage_rig()
    row = rig.submit(PROMPT)
    get = fetched(rig, row, 1)
    assert rig.storage.busy
    rig.executor.finish(get.op_id)
    rig.head()
    assert not rig.storage.busy
    rig.storage.clear()
    assert rig.shelf.pinned == set()
    rig.storage.admitted(row)


@pytest.mark.contract("CT-18")
def test_without_a_backend_nothing_is_prepared_or_planned() -> None:
    none = NoStorage()
    assert not none.takes(0, most=1000)
    assert not none.busy
    none.advance(StorageTick(storage=True), round_id=1)
    assert none.plan(round_id=1) == ()
