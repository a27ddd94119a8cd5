"""Admission: order, defaults, refusals, duplicates and the retirement fence."""

from __future__ import annotations

import logging

import attrs
import pytest
from rig import SPECS, Rig, ScriptedScheduler, hand_rig, request

from tokenspeed.control.ingress import Ingress, resolve_sampling
from tokenspeed.device.capture import Strict
from tokenspeed.plane.messages import (
    NO_TOP_K,
    GenerateRequest,
    OutputBatch,
    PauseMode,
    PauseOp,
    SamplingParams,
    frozen_tokens,
)
from tokenspeed.plane.table import request_table
from tokenspeed.settings.model import SchedulerSettings, Settings
from tokenspeed.testing import ScriptedPlane


def ingress(**changes: object) -> Ingress:
    table = request_table(slots=4, max_len=SPECS.max_model_len)
    fields: dict[str, object] = {"specs": SPECS, "table": table, "max_waiting": 8, "grammar_refusal": lambda _: ""}
    return Ingress(**(fields | changes))  # type: ignore[arg-type]


def admit(gate: Ingress, *requests: GenerateRequest, held: bool = False, waiting: int = 0) -> object:
    return gate.admit(requests, holds=lambda _: held, buffers=lambda _: False, waiting=lambda: waiting)


@pytest.mark.contract("IS-1")
def test_requests_ahead_of_a_pause_are_admitted_and_those_behind_it_buffered() -> None:
    rig = hand_rig()
    rig.put(request("a", 3), PauseOp(call_id=1, mode=PauseMode.ABORT), request("b", 3))
    rig.settle()
    assert rig.link.finish("a") == (3, 0, "the engine was paused")
    assert rig.link.finish("b") is None
    assert rig.loop.control_ops.buffers("b")
    assert [(reply.call_id, reply.success) for reply in rig.link.replies] == [(1, True)]


@pytest.mark.contract("IS-2", "PT-19")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "embed"}, "kind"),
        ({"unsupported": ("multimodal_inputs",)}, "multimodal_inputs"),
        ({"input_ids": frozen_tokens([])}, "prompt"),
        ({"input_ids": frozen_tokens([1] * 256)}, "prompt"),
        ({"input_ids": frozen_tokens([1, 1000])}, "prompt"),
        ({"input_ids": frozen_tokens([-1])}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"sampling": SamplingParams(stop_token_ids=(5000,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias=((5000, 1.0),))}, "logit_bias"),
    ],
)
def test_a_request_beyond_what_the_engine_serves_is_refused_before_anything_else(
    change: dict[str, object], field: str
) -> None:
    rig = hand_rig(scheduler=ScriptedScheduler(), plane=ScriptedPlane())
    rig.put(attrs.evolve(request("a", 3), **change))
    rig.rounds(2)
    finish, status, message = rig.link.finish("a") or (0, 0, "")
    assert (finish, status) == (3, 400)
    assert field in message
    assert rig.loop.scheduler.submitted == []  # type: ignore[attr-defined]
    assert rig.plane.names() == []
    assert rig.loop.table.live == 0


@pytest.mark.contract("IS-2")
def test_a_grammar_is_refused_by_name_while_no_compiler_is_there() -> None:
    rig = hand_rig()
    rig.put(request("a", 3, sampling=SamplingParams(json_schema="{}")))
    rig.rounds(1)
    assert (rig.link.finish("a") or (0, 0, ""))[2].startswith("json_schema")


@pytest.mark.contract("IS-3", "PT-19")
@pytest.mark.parametrize(("prompt", "asked", "budget"), [(10, 5, 5), (10, None, 246), (10, 10_000, 246), (255, 7, 1)])
def test_the_token_budget_is_what_was_asked_for_cut_to_the_context(prompt: int, asked: int, budget: int) -> None:
    gate = ingress()
    intake = admit(gate, request("a", prompt, max_new=asked))
    assert gate.table.identity.max_new[intake.rows[0]] == budget  # type: ignore[attr-defined]


@pytest.mark.contract("IS-3")
def test_missing_sampling_fields_come_from_the_checkpoint_then_from_neutral_values() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20)
    got = resolve_sampling(SamplingParams(top_p=0.5), defaults, rid="a", eos=frozenset({7}), budget=10)
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.repetition_penalty) == (0.6, 20, 0.5, 0.0, 1.0)
    plain = resolve_sampling(
        SamplingParams(top_k=NO_TOP_K, min_new_tokens=3), SamplingParams(), rid="a", eos=frozenset({7}), budget=10
    )
    assert (plain.temperature, plain.top_k, plain.banned_until_min) == (1.0, 0, (7,))


def test_a_missing_seed_is_derived_from_the_id_and_differs_between_ids() -> None:
    seeds = [
        resolve_sampling(SamplingParams(), SamplingParams(), rid=rid, eos=frozenset(), budget=1).seed
        for rid in ("a", "a", "b")
    ]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.contract("IS-4")
def test_the_scheduler_is_given_rows_with_plain_columns_and_never_a_message() -> None:
    scheduler = ScriptedScheduler()
    rig = hand_rig(scheduler=scheduler, plane=ScriptedPlane())
    rig.put(request("a", 3), request("b", 4))
    rig.rounds(1)
    (rows,) = scheduler.submitted
    assert [type(row) for row in rows] == [int, int]
    identity = rig.loop.table.identity
    assert [(identity.rid[row], int(identity.prompt_len[row])) for row in rows] == [("a", 3), ("b", 4)]
    assert not any(isinstance(column, list) and isinstance(column[rows[0]], GenerateRequest) for column in columns(rig))


def columns(rig: Rig) -> list[object]:
    """All columns of the request table."""
    table = rig.loop.table
    groups = [getattr(table, field.name) for field in attrs.fields(type(table))]
    return [getattr(group, f.name) for group in groups if attrs.has(type(group)) for f in attrs.fields(type(group))]


@pytest.mark.contract("IS-6", "IS-7", "IS-8", "IS-9", "IS-10", "IS-11")
def test_a_repeated_id_is_dropped_with_a_warning_and_the_original_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    alone = hand_rig()
    alone.put(request("a", 5, max_new=8))
    alone.settle()
    rig = hand_rig()
    rig.put(request("a", 5, max_new=8), request("a", 9, max_new=8))
    with caplog.at_level(logging.WARNING):
        rig.rounds(3)
        # A valid one, and one that would be refused for two reasons.
        rig.put(request("a", 6, max_new=8))
        rig.rounds(1)
        rig.put(
            attrs.evolve(request("a", 5), input_ids=frozen_tokens([]), unsupported=("multimodal_inputs",)),
        )
        said = rig.link.tokens("a")
        rig.rounds(1)
        assert rig.link.finish("a") is None
        assert rig.link.tokens("a")[: len(said)] == said
        rig.settle()
    assert rig.link.tokens("a") == alone.link.tokens("a")
    assert rig.link.finish("a") == (2, 0, "")
    assert rig.loop.state.funnelled == 1
    # The device heard of nothing but the original: as many calls as without the duplicates, one seat, one release.
    assert rig.plane.names().count("execute") == alone.plane.names().count("execute")
    assert [name for name in rig.plane.names() if name == "release"] == ["release"]
    assert [seat.prompt_len for dispatch in rig.plane.dispatches for seat in dispatch.seats] == [5]
    assert sum("request a: dropped" in record.message for record in caplog.records) == 3


@pytest.mark.contract("IS-6", "IS-11")
@pytest.mark.parametrize("why", ["invalid", "queue full", "held"])
def test_the_second_of_an_id_in_a_round_is_dropped_also_when_the_first_was_refused(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = ScriptedScheduler()
    settings = Settings(scheduler=SchedulerSettings(max_waiting=1))
    rig = hand_rig(settings=settings, scheduler=scheduler, plane=ScriptedPlane())
    first = request("a", 3)
    if why == "invalid":
        first = attrs.evolve(first, input_ids=frozen_tokens([]))
    elif why == "queue full":
        rig.put(request("full", 3))
    else:
        rig.put(request("a", 3))
        rig.rounds(1)
        rig.abort("a")
        rig.rounds(1)
        rig.link.log.clear()
    submitted = len(scheduler.submitted)
    rig.put(first, request("a", 4))
    with caplog.at_level(logging.WARNING):
        rig.rounds(2)
    answers = [
        status for sent in rig.link.sent for rid, status in zip(sent.rids, sent.status, strict=True) if rid == "a"
    ]
    assert answers == [{"invalid": 400, "queue full": 429, "held": 409}[why]]
    assert len(scheduler.submitted) - submitted == (why == "queue full")
    assert sum("request a: dropped" in record.message for record in caplog.records) == 1


@pytest.mark.contract("IS-13", "IS-14", "IS-15", "IS-16", "IS-17", "IS-18", "SP-5")
def test_an_id_that_output_forgot_but_the_scheduler_holds_is_refused_with_409_then_free_again() -> None:
    probe = hand_rig()
    probe.put(request("p", 5, max_new=9))
    probe.settle()
    wanted = probe.link.tokens("p")
    stop = next(at for at, token in enumerate(wanted) if at >= 2 and token not in wanted[:at])
    ending = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(wanted[stop],))
    rig = hand_rig()
    rig.put(request("a", 5, max_new=9, sampling=ending))
    while rig.link.finish("a") is None:
        rig.loop.round()
    row = rig.loop.table.row_of("a")
    assert row is not None
    assert not rig.loop.table.output.owned[row]
    assert rig.loop.scheduler.holds(row)
    # Nobody could foresee the stop: a forward with the request is in flight still.
    assert [row in flight.batch.rows.tolist() for flight in rig.loop.state.in_flight] == [True]
    first, asked, seats = len(rig.link.log), rig.plane.names(), seats_of(rig)
    rig.put(request("a", 7, max_new=2))
    rig.loop.round()
    (refused,) = [entry for entry in rig.link.log[first:] if isinstance(entry, OutputBatch) and entry.rids == ["a"]]
    assert (refused.status, refused.output_ids) == ([409], [[]])
    # Of the device nothing was asked but what the original's last result took.
    assert seats_of(rig) == seats
    assert set(rig.plane.names()[len(asked) :]) <= {"commit", "note_forwarded"}
    assert rig.loop.state.funnelled == 1
    rig.settle()
    assert rig.loop.table.row_of("a") is None
    assert rig.link.tokens("a") == wanted[: stop + 1]
    rig.link.log.clear()
    rig.put(request("a", 5, max_new=9, sampling=ending))
    rig.settle()
    assert rig.link.tokens("a") == wanted[: stop + 1]
    assert rig.link.finish("a") is not None


def seats_of(rig: Rig) -> int:
    return sum(len(dispatch.seats) for dispatch in rig.plane.dispatches)


@pytest.mark.contract("IS-16")
@pytest.mark.parametrize("held", [True, False])
def test_what_the_schedulers_lookup_says_decides_and_nothing_else(held: bool) -> None:
    gate = ingress()
    first = admit(gate, request("a", 3))
    (row,) = first.rows  # type: ignore[attr-defined]
    gate.table.output.owned[row] = False
    if not held:
        gate.table.free(row)
    second = admit(gate, request("a", 3), held=held)
    assert [refusal.status for refusal in second.refusals] == [409] * held  # type: ignore[attr-defined]
    assert len(second.rows) == (not held)  # type: ignore[attr-defined]


def test_a_full_waiting_queue_answers_429_and_keeps_what_it_has() -> None:
    settings = Settings(scheduler=SchedulerSettings(max_waiting=3))
    rig = hand_rig(settings=settings, scheduler=ScriptedScheduler(), plane=ScriptedPlane())
    rig.put(*(request(f"r{i}", 3) for i in range(5)))
    rig.rounds(1)
    assert [rig.link.finish(f"r{i}") is None for i in range(5)] == [True, True, True, False, False]
    assert (rig.link.finish("r4") or (0, 0, ""))[1] == 429


def test_an_abort_of_an_unknown_id_changes_nothing() -> None:
    rig = hand_rig()
    rig.put(request("a", 5, max_new=4))
    rig.abort("nobody")
    rig.settle()
    assert len(rig.link.tokens("a")) == 4


@pytest.mark.contract("DP-50")
def test_the_history_in_a_seat_is_a_copy_that_does_not_change_with_the_table() -> None:
    rig = hand_rig(plane=ScriptedPlane())
    rig.put(request("a", [5, 6, 7], sampling=SamplingParams(temperature=0.0, presence_penalty=1.0)))
    rig.rounds(1)
    (seat,) = rig.plane.dispatches[0].seats
    Strict().check("execute", seat)
    rig.loop.table.tokens.seated[seat.slot] = 9  # somebody else's tokens
    assert seat.history.tolist() == [5, 6, 7]
