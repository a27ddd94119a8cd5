"""The commit: token lists, ends, surplus results, columns, logprobs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rig import SPECS, hand_rig, request

from tokenspeed.control.outbox import Outbox
from tokenspeed.control.output import Output
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Finish, TopLogprobs, frozen_tokens
from tokenspeed.plane.plan import ForwardBatch, Sampling, int32
from tokenspeed.plane.results import ForwardResult, PromptLogprobs
from tokenspeed.plane.table import RequestTable, request_table
from tokenspeed.testing import ScriptedPlane, token_script


def eos(*ids: int) -> np.ndarray:
    mask = np.zeros(1000, dtype=np.bool_)
    mask[list(ids)] = True
    return mask


def table_with(*prompts: int, max_new: int = 10, **changes: object) -> RequestTable:
    table = request_table(slots=8, max_len=64)
    for i, length in enumerate(prompts):
        ids = frozen_tokens(range(1, length + 1))
        row = table.add(rid=f"r{i}", tokens=ids, max_new=max_new, sampling=Sampling(), **changes)  # type: ignore[arg-type]
        table.seat(row, i)
    return table


def batch(table: RequestTable, *rids: str, samples: list[bool] | None = None) -> ForwardBatch:
    rows = [table.by_rid[rid] for rid in rids]
    known = table.tokens.known[rows]
    return ForwardBatch(
        rows=int32(rows),
        slots=int32(table.schedule.slot[rows]),
        starts=int32(known - 1),
        counts=int32([1] * len(rows)),
        samples=np.array(samples if samples is not None else [True] * len(rows)),
        input_ids=int32([-1] * len(rows)),
    )


@pytest.mark.contract("OL-1", "OL-2", "HS-1", "PT-20")
def test_a_commit_appends_tokens_and_returns_events_without_a_scheduler_or_socket() -> None:
    table = table_with(3, 5)
    output = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table))
    landed = output.commit(batch(table, "r0", "r1"), ForwardResult(tokens=[41, 42]))
    assert landed.finished == ()
    assert table.tokens_of(table.by_rid["r0"]).tolist() == [1, 2, 3, 41]
    assert table.tokens_of(table.by_rid["r1"]).tolist() == [1, 2, 3, 4, 5, 42]
    message = output.take(None)
    assert message is not None
    assert message.rids == ["r0", "r1"]
    assert message.output_ids == [[41], [42]]
    assert message.completion_tokens == [1, 1]
    assert output.take(None) is None


@pytest.mark.contract("HS-1")
def test_after_every_commit_the_token_list_is_prompt_plus_outputs() -> None:
    rig = hand_rig()
    rig.put(*(request(f"r{i}", 7 + i, max_new=9) for i in range(4)))
    for _ in range(40):
        rig.loop.round()
        for rid, row in rig.loop.table.by_rid.items():
            sent = rig.link.tokens(rid)
            length = 7 + int(rid[1:])
            assert rig.loop.table.tokens_of(row).tolist() == [*range(1, length + 1), *sent]
    assert all(rig.link.finish(f"r{i}") for i in range(4))


@pytest.mark.parametrize(
    ("changes", "token", "finish"),
    [
        ({}, 0, Finish.STOP),
        ({"eos_ends": False}, 0, 0),
        ({"extra_stops": frozenset({9})}, 9, Finish.STOP),
        ({"eos_ends": False, "extra_stops": frozenset({0})}, 0, Finish.STOP),
        ({"max_new": 1}, 5, Finish.LENGTH),
        ({"max_new": 1}, 0, Finish.STOP),
    ],
)
def test_a_request_ends_on_its_stop_ids_and_at_its_budget(changes: dict[str, object], token: int, finish: int) -> None:
    table = table_with(3, **changes)
    output = Output(table=table, is_eos=eos(0, 99), outbox=Outbox(table=table))
    landed = output.commit(batch(table, "r0"), ForwardResult(tokens=[token]))
    message = output.take(None)
    assert message is not None
    assert message.finished == [finish]
    assert bool(landed.finished) == bool(finish)


def test_no_stop_id_ends_a_request_before_its_minimum() -> None:
    table = request_table(slots=2, max_len=32)
    row = table.add(
        rid="r0", tokens=frozen_tokens([1]), max_new=9, sampling=Sampling(min_new_tokens=3), extra_stops=frozenset({5})
    )
    table.seat(row, 0)
    output = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table))
    ends = [output.commit(batch(table, "r0"), ForwardResult(tokens=[token])).finished for token in (0, 5, 5)]
    assert ends == [(), (), (row,)]


@pytest.mark.contract("OL-7", "DO-13")
def test_a_result_behind_the_end_is_surplus_and_produces_nothing() -> None:
    specs_plane = ScriptedPlane(answer=token_script([[7], [0], [55], [55]]))
    rig = hand_rig(plane=specs_plane, overlap=True)
    from tokenspeed.plane.messages import SamplingParams

    rig.put(request("a", 3, max_new=20, sampling=SamplingParams(temperature=0.0)))
    rig.settle()
    planned = sum(len(plan.batch.rows) for plan in specs_plane.plans if plan.batch is not None)
    assert planned == 3
    assert rig.link.tokens("a") == [7, 0]
    assert rig.link.finish("a") == (int(Finish.STOP), 0, "")
    assert rig.loop.table.live == 0


@pytest.mark.contract("OL-17", "SP-54")
def test_a_cancelled_request_gives_one_abort_and_no_token_after_it() -> None:
    rig = hand_rig()
    rig.put(request("a", 5, max_new=50), request("b", 5, max_new=10))
    rig.rounds(3)
    seen = len(rig.link.tokens("a"))
    rig.abort("a")
    rig.settle()
    assert len(rig.link.tokens("a")) == seen
    assert (rig.link.finish("a") or (0,))[0] == Finish.ABORT
    assert len(rig.link.tokens("b")) == 10
    assert rig.loop.scheduler.sizes().held == 0


@pytest.mark.contract("OL-6")
def test_a_row_that_is_not_a_number_ends_alone_with_an_error() -> None:
    table = table_with(3, 3, 3)
    output = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table))
    landed = output.commit(batch(table, "r0", "r1", "r2"), ForwardResult(tokens=[4, 5, 6], nan_rows=[1]))
    message = output.take(None)
    assert message is not None
    ends = dict(zip(message.rids, zip(message.finished, message.status, message.output_ids, strict=True), strict=True))
    assert ends["r1"] == (int(Finish.ABORT), 500, [])
    assert ends["r0"] == (0, 0, [4])
    assert ends["r2"] == (0, 0, [6])
    assert landed.finished == (table.by_rid["r1"],)


@pytest.mark.contract("OL-3", "OL-4")
def test_only_rows_that_asked_get_logprobs_and_the_plan_travels_with_the_dispatch() -> None:
    plane = ScriptedPlane(
        answer=lambda b: ForwardResult(
            tokens=[8] * int(b.samples.sum()),
            token_logprobs={0: -0.5},
            token_top_logprobs={0: TopLogprobs(ids=(8, 9), values=(-0.5, -1.5))},
        )
    )
    rig = hand_rig(plane=plane, overlap=False)
    rig.put(request("a", 3, max_new=1, return_logprob=True, top_logprobs=2), request("b", 3, max_new=1))
    rig.rounds(1)
    assert plane.dispatches[0].logprobs.sampled == ((0, 2),)
    sent = rig.link.sent[0]
    assert dict(zip(sent.rids, sent.logprobs, strict=True)) == {"a": [-0.5], "b": []}
    assert dict(zip(sent.rids, sent.top_logprobs, strict=True))["a"][0].ids == (8, 9)


@pytest.mark.contract("OL-5")
@pytest.mark.parametrize("start", [0, 4])
def test_prompt_logprobs_are_complete_and_in_order_over_chunks(start: int) -> None:
    def values(b: ForwardBatch) -> ForwardResult:
        plan = plane.dispatches[-1].logprobs
        parts = [
            PromptLogprobs(
                index=i,
                first=first,
                values=[-float(t) for t in targets],
                top=[TopLogprobs(ids=(), values=())] * len(targets),
            )
            for (i, first, _), targets in zip(plan.prompt, plan.prompt_targets, strict=True)
        ]
        return ForwardResult(tokens=[8] * int(b.samples.sum()), prompt_logprobs=parts)

    plane = ScriptedPlane(answer=values)
    rig = hand_rig(plane=plane, overlap=False)
    rig.put(request("a", 80, max_new=2, prompt_logprobs=start))
    rig.settle()
    rows = [row for sent in rig.link.sent for row in sent.prompt_logprobs if row]
    assert len(rows) == 1
    expected = [None if p == 0 else -float(p + 1) for p in range(start, 80)]
    assert rows[0] == expected
    ids = [row for sent in rig.link.sent for row in sent.prompt_logprob_ids if row]
    assert ids == [list(range(start + 1, 81))]
    assert sum(plan.batch is not None and not plan.batch.samples.all() for plan in plane.plans) >= 2


@pytest.mark.contract("OL-5")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_only_token_of_a_prompt_has_its_entry_too_and_once(overlap: bool) -> None:
    plane = ScriptedPlane(answer=lambda b: ForwardResult(tokens=[8] * int(b.samples.sum())))
    rig = hand_rig(plane=plane, overlap=overlap)
    lone = request("a", 1, max_new=4, prompt_logprobs=0, return_logprob=True, top_logprobs=2)
    rig.put(lone, request("b", 1, max_new=4), request("c", 1, max_new=1, prompt_logprobs=0))
    rig.settle()
    told = [
        (rid, values, tops, ids)
        for sent in rig.link.sent
        for rid, values, tops, ids in zip(
            sent.rids, sent.prompt_logprobs, sent.prompt_top_logprobs, sent.prompt_logprob_ids, strict=True
        )
        if values
    ]
    assert told == [("a", [None], [None], [1]), ("c", [None], [None], [1])]


@pytest.mark.contract("OL-12")
def test_a_round_sends_at_most_one_message_with_all_its_requests() -> None:
    rig = hand_rig()
    rig.put(request("a", 3, max_new=1), request("b", 3, max_new=1))
    for _ in range(6):
        before = len(rig.link.sent)
        rig.loop.round()
        assert len(rig.link.sent) - before <= 1
    together = [sent.rids for sent in rig.link.sent if any(sent.finished)]
    assert [sorted(rids) for rids in together] == [["a", "b"]]


@pytest.mark.contract("OL-14")
def test_ended_requests_are_released_by_a_queued_operation_in_the_round_of_their_end() -> None:
    rig = hand_rig()
    rig.put(request("a", 3, max_new=2))
    rig.settle()
    names = rig.plane.names()
    assert names.count("release") == 1
    assert names.index("release") > max(i for i, name in enumerate(names) if name == "execute")


def test_two_commits_in_one_round_merge_into_one_entry_a_request() -> None:
    table = table_with(3)
    output = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table))
    output.commit(batch(table, "r0"), ForwardResult(tokens=[4]))
    output.commit(batch(table, "r0"), ForwardResult(tokens=[5]))
    message = output.take(None)
    assert message is not None
    assert (message.rids, message.output_ids, message.completion_tokens) == (["r0"], [[4, 5]], [2])


def test_a_result_of_the_wrong_length_is_a_broken_invariant() -> None:
    table = table_with(3)
    with pytest.raises(InvariantBroken, match="one token for each sampled row"):
        Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)).commit(
            batch(table, "r0"), ForwardResult(tokens=[])
        )


def test_a_token_outside_the_vocabulary_is_a_broken_invariant() -> None:
    table = table_with(3)
    with pytest.raises(InvariantBroken, match=r"a token outside the vocabulary \(vocab=1000, tokens=\[1000\]\)"):
        Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)).commit(
            batch(table, "r0"), ForwardResult(tokens=[1000])
        )


def test_a_script_that_is_over_says_so() -> None:
    rig = hand_rig(plane=ScriptedPlane(answer=token_script([[7], [8]])))
    rig.put(request("a", 3, max_new=4))
    with pytest.raises(InvariantBroken, match="the script has no answer for another forward"):
        rig.settle()


def test_outputs_in_any_company_equal_a_request_alone() -> None:
    rng = random.Random(5)
    prompts = {f"r{i}": [rng.randrange(1, 999) for _ in range(rng.randrange(1, 90))] for i in range(20)}
    alone = {}
    for rid, prompt in prompts.items():
        rig = hand_rig(overlap=False)
        rig.put(request(rid, prompt, max_new=12))
        rig.settle()
        alone[rid] = rig.link.tokens(rid)
        assert len(alone[rid]) == 12
    for overlap in (False, True):
        rig = hand_rig(overlap=overlap)
        waiting = list(prompts)
        while waiting:
            for _ in range(rng.randrange(0, 4)):
                if waiting:
                    rid = waiting.pop()
                    rig.put(request(rid, prompts[rid], max_new=12))
            rig.loop.round()
        rig.settle()
        assert {rid: rig.link.tokens(rid) for rid in prompts} == alone
        assert rig.loop.scheduler.sizes().held == 0
        assert rig.loop.scheduler.available_lcm_blocks() == SPECS.num_pages - 1


def test_nothing_in_a_result_column_is_a_numpy_value() -> None:
    rig = hand_rig()
    rig.put(request("a", 3, max_new=3, return_logprob=False))
    rig.settle()
    for sent in rig.link.sent:
        for name in ("finished", "prompt_tokens", "completion_tokens", "cached_tokens", "status"):
            assert all(type(value) is int for value in getattr(sent, name)), name
        assert all(type(token) is int for ids in sent.output_ids for token in ids)


@pytest.mark.contract("OL-5")
def test_a_recomputed_prompt_is_not_told_its_logprobs_a_second_time() -> None:
    table = table_with(6, prompt_from=0)
    output = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table))
    row = table.by_rid["r0"]
    whole = ForwardBatch(
        rows=int32([row]),
        slots=int32([0]),
        starts=int32([0]),
        counts=int32([6]),
        samples=np.array([True]),
        input_ids=int32([1, 2, 3, 4, 5, 6]),
    )
    assert output.logprob_plan(whole).prompt == ((0, 1, 0),)
    output.commit(whole, ForwardResult(tokens=[7]))
    assert output.logprob_plan(whole).prompt == ()
