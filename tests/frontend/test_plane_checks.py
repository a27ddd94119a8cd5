"""The checks a request passes, at the frontend and again at an engine's ingress."""

from __future__ import annotations

import json
import math

import attrs
import pytest

from tokenspeed.plane.checks import Fault, prompt_faults, request_faults, sampling_faults, shown
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens

VOCAB = 100

BAD_SAMPLING: list[tuple[str, dict[str, object], str]] = [
    ("temperature", {"temperature": math.nan}, "temperature"),
    ("negative temperature", {"temperature": -0.1}, "temperature"),
    ("infinite temperature", {"temperature": math.inf}, "temperature"),
    ("text as temperature", {"temperature": "nan"}, "temperature"),
    ("true as temperature", {"temperature": True}, "temperature"),
    ("top_p of zero", {"top_p": 0.0}, "top_p"),
    ("top_p above one", {"top_p": 1.0001}, "top_p"),
    ("top_p not a number", {"top_p": math.nan}, "top_p"),
    ("min_p negative", {"min_p": -1e-9}, "min_p"),
    ("min_p not a number", {"min_p": math.nan}, "min_p"),
    ("top_k of -2", {"top_k": -2}, "top_k"),
    ("top_k fractional", {"top_k": 1.5}, "top_k"),
    ("top_k huge", {"top_k": 2**31}, "top_k"),
    ("frequency_penalty", {"frequency_penalty": -2.1}, "frequency_penalty"),
    ("frequency_penalty nan", {"frequency_penalty": math.nan}, "frequency_penalty"),
    ("presence_penalty", {"presence_penalty": math.inf}, "presence_penalty"),
    ("repetition_penalty of zero", {"repetition_penalty": 0.0}, "repetition_penalty"),
    ("repetition_penalty nan", {"repetition_penalty": math.nan}, "repetition_penalty"),
    ("max_tokens of zero", {"max_new_tokens": 0}, "max_tokens"),
    ("max_tokens negative", {"max_new_tokens": -1}, "max_tokens"),
    ("max_tokens beyond 32 bits", {"max_new_tokens": 2**63}, "max_tokens"),
    ("min_tokens negative", {"min_new_tokens": -1}, "min_tokens"),
    ("min above max", {"max_new_tokens": 3, "min_new_tokens": 4}, "min_tokens"),
    ("seed beyond 64 bits", {"seed": 2**64}, "seed"),
    ("stop id of vocab", {"stop_token_ids": (VOCAB,)}, "stop_token_ids[0]"),
    ("stop id negative", {"stop_token_ids": (1, -1)}, "stop_token_ids[1]"),
    ("stop id as text", {"stop_token_ids": ("12",)}, "stop_token_ids[0]"),
    ("many stop ids", {"stop_token_ids": (1,) * 1000}, "stop_token_ids"),
    ("bias id out of vocab", {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias key"),
    ("bias id of 64 bits", {"logit_bias": ((2**63, 1.0),)}, "logit_bias key"),
    ("bias nan", {"logit_bias": ((1, math.nan),)}, "logit_bias[1]"),
    ("bias too large", {"logit_bias": ((1, 100.5),)}, "logit_bias[1]"),
    ("two grammars", {"regex": "a", "ebnf": "b"}, "regex and ebnf"),
    ("empty grammar", {"regex": ""}, "regex"),
]


@pytest.mark.parametrize(("sampling", "field"), [row[1:] for row in BAD_SAMPLING], ids=[row[0] for row in BAD_SAMPLING])
def test_a_bad_sampling_value_is_one_fault_naming_field_value_and_range(
    sampling: dict[str, object], field: str
) -> None:
    found = sampling_faults(SamplingParams(**sampling), vocab_size=VOCAB)  # type: ignore[arg-type]
    assert [fault.field for fault in found] == [field]
    assert found[0].value
    assert found[0].allowed
    json.dumps(str(found[0]), allow_nan=False).encode()


def test_all_faults_are_returned_at_once() -> None:
    params = SamplingParams(temperature=math.nan, top_p=2.0, top_k=-5, seed=2**70)
    assert [f.field for f in sampling_faults(params, vocab_size=VOCAB)] == ["temperature", "top_p", "top_k", "seed"]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=-0.0, top_p=1.0, top_k=-1, min_p=0.0),
        SamplingParams(temperature=1e-8, top_k=1 << 30),
        SamplingParams(temperature=2, top_p=1, frequency_penalty=-2, presence_penalty=2, repetition_penalty=1),
        SamplingParams(max_new_tokens=1_000_000, min_new_tokens=1_000_000),
        SamplingParams(stop_token_ids=(0, VOCAB - 1), logit_bias=((0, -100.0), (VOCAB - 1, 100))),
    ],
)
def test_values_within_their_ranges_have_no_fault(params: SamplingParams) -> None:
    assert sampling_faults(params, vocab_size=VOCAB) == ()


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ([], "prompt"),
        ([1] * 16, "prompt"),
        ([1, -1], "prompt[1]"),
        ([VOCAB], "prompt[0]"),
        ([VOCAB + 1, -3], "prompt[0]"),
        ([2**31], "prompt[0]"),
        ([2**63], "prompt[0]"),
        ([2**64], "prompt[0]"),
        ([1, "12"], "prompt[1]"),
        ([1, 1.5], "prompt[1]"),
        ([1, True, None], "prompt[1]"),
        ([1, [2]], "prompt[1]"),
    ],
)
def test_a_bad_prompt_is_a_fault(ids: list[int], field: str) -> None:
    found = prompt_faults(ids, vocab_size=VOCAB, max_model_len=16)
    assert [fault.field for fault in found] == [field]


def test_a_prompt_that_leaves_room_for_one_token_is_accepted() -> None:
    assert prompt_faults([VOCAB - 1] * 15, vocab_size=VOCAB, max_model_len=16) == ()


def test_a_request_is_checked_against_what_the_engine_can_return() -> None:
    good = GenerateRequest(rid="r", input_ids=frozen_tokens([1, 2]), return_logprob=True, top_logprobs=5)

    def fields(request: GenerateRequest) -> list[str]:
        return [f.field for f in request_faults(request, vocab_size=VOCAB, max_model_len=16, max_logprobs=5)]

    assert fields(good) == []
    assert fields(attrs.evolve(good, top_logprobs=6)) == ["top_logprobs"]
    assert fields(attrs.evolve(good, top_logprobs=-1)) == ["top_logprobs"]
    assert fields(attrs.evolve(good, prompt_logprobs=2)) == ["prompt_logprobs"]
    assert fields(attrs.evolve(good, input_ids=frozen_tokens([]), sampling=SamplingParams(temperature=-1.0))) == [
        "prompt",
        "temperature",
    ]


def test_a_shown_value_is_short_and_can_always_be_encoded() -> None:
    for value in ("\ud800" * 500, "x" * 10_000, [1] * 10_000, 10**5000, math.nan, {"a": ["b"] * 99}, b"\xff"):
        text = shown(value)
        assert len(text) <= 80
        text.encode("utf-8")


def test_a_fault_reads_as_field_value_and_range() -> None:
    text = str(Fault(field="n", value="0", allowed="an integer from 1 to 16"))
    assert text == "n: 0 is not allowed; expected an integer from 1 to 16"
