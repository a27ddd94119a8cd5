"""Admission: order, defaults, refusals, duplicates and the retirement fence."""

from __future__ import annotations

import logging

import attrs
import pytest
from rig import SPECS, ScriptedScheduler, hand_rig, request

from tokenspeed.control.ingress import Ingress, resolve_sampling
from tokenspeed.device.capture import Strict
from tokenspeed.plane.messages import NO_TOP_K, GenerateRequest, PauseMode, PauseOp, SamplingParams, frozen_tokens
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
    assert scheduler.submitted == [(0, 1)] or scheduler.submitted == [(1, 0)] or len(scheduler.submitted[0]) == 2
    assert all(isinstance(row, int) for row in scheduler.submitted[0])
    assert [rig.loop.table.identity.prompt_len[row] for row in scheduler.submitted[0]] == [3, 4]


@pytest.mark.contract("IS-6", "IS-7", "IS-8", "IS-9", "IS-10", "IS-11")
def test_a_repeated_id_is_dropped_with_a_warning_and_the_original_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    alone = hand_rig()
    alone.put(request("a", 5, max_new=8))
    alone.settle()
    rig = hand_rig()
    rig.put(request("a", 5, max_new=8), request("a", 9, max_new=8))
    with caplog.at_level(logging.WARNING):
        rig.rounds(3)
        rig.put(attrs.evolve(request("a", 5), input_ids=frozen_tokens([])))
        rig.settle()
    assert rig.link.tokens("a") == alone.link.tokens("a")
    assert rig.link.finish("a") == (2, 0, "")
    assert sum("request a: dropped" in record.message for record in caplog.records) == 2


@pytest.mark.contract("IS-13", "IS-14", "IS-15", "IS-16", "IS-17", "IS-18", "SP-5")
def test_an_id_that_output_forgot_but_the_scheduler_holds_is_refused_with_409_then_free_again() -> None:
    rig = hand_rig()
    rig.put(request("a", 5, max_new=2))
    while rig.link.finish("a") is None:
        rig.loop.round()
    row = rig.loop.table.row_of("a")
    assert row is not None
    assert rig.loop.scheduler.holds(row)
    first = len(rig.link.log)
    rig.put(request("a", 5, max_new=2))
    rig.loop.round()
    refused = [entry for entry in rig.link.sent[first:] if entry.rids == ["a"]] or rig.link.sent[-1:]
    assert refused[0].status == [409]
    rig.settle()
    assert rig.loop.table.row_of("a") is None
    rig.link.log.clear()
    rig.put(request("a", 5, max_new=2))
    rig.settle()
    assert len(rig.link.tokens("a")) == 2


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
