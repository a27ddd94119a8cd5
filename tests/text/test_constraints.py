"""The ways in which clients ask for a constrained answer."""

from __future__ import annotations

import json

import pytest

from tokenspeed.errors import RequestError
from tokenspeed.frontend.text.constraints import Constraint, bad_word_ids, constraint_of
from tokenspeed.plane.messages import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def schema(value: object = SCHEMA) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(value))


GIVEN: list[tuple[dict[str, object], Constraint | None]] = [
    ({}, None),
    ({"response_format": None, "regex": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, schema({"type": "object"})),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, schema()),
    ({"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, schema()),
    ({"response_format": TAG}, Constraint(kind="structural_tag", text=json.dumps(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, schema()),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, schema()),
    ({"structured_outputs": {"regex": "a+"}}, Constraint(kind="regex", text="a+")),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint(kind="ebnf", text='root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, schema({"type": "object"})),
    ({"structured_outputs": {"structural_tag": TAG}}, Constraint(kind="structural_tag", text=json.dumps(TAG))),
    ({"structured_outputs": {"choice": ["a", 'b"', "a"]}}, Constraint(kind="ebnf", text='root ::= "a" | "b\\""')),
    ({"structured_outputs": {"choice": ["é"]}}, Constraint(kind="ebnf", text='root ::= "\\U000000e9"')),
    ({"guided_json": SCHEMA}, schema()),
    ({"guided_regex": "a"}, Constraint(kind="regex", text="a")),
    ({"guided_choice": ["a"]}, Constraint(kind="ebnf", text='root ::= "a"')),
    ({"guided_grammar": "x"}, Constraint(kind="ebnf", text="x")),
    ({"json_schema": SCHEMA}, schema()),
    ({"json_schema": json.dumps(SCHEMA)}, schema()),
    ({"ebnf": "x"}, Constraint(kind="ebnf", text="x")),
    ({"grammar": "x"}, Constraint(kind="ebnf", text="x")),
    ({"structural_tag": json.dumps(TAG)}, Constraint(kind="structural_tag", text=json.dumps(TAG))),
]


@pytest.mark.parametrize(("fields", "wanted"), GIVEN, ids=[json.dumps(fields)[:50] for fields, _ in GIVEN])
def test_each_form_becomes_the_same_grammar(fields: dict[str, object], wanted: Constraint | None) -> None:
    assert constraint_of({"model": "x", **fields}) == wanted


WRONG: list[tuple[dict[str, object], str]] = [
    ({"response_format": {"type": "zzz"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "json_schema.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "exactly one"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, r"structured_outputs.choice\[1\]"),
    ({"structured_outputs": {"zzz": 1}}, "structured_outputs.zzz"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "disable_any_whitespace"),
    ({"regex": 3}, "regex"),
    ({"json_schema": 3}, "json_schema"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "at most one"),
]


@pytest.mark.parametrize(("fields", "named"), WRONG, ids=[json.dumps(fields)[:50] for fields, _ in WRONG])
def test_a_wrong_form_is_refused_with_the_field_s_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named) as refusal:
        constraint_of(fields)
    assert refusal.value.status == 400


def test_a_constraint_goes_into_the_sampling_that_it_is_for() -> None:
    assert schema().into(SamplingParams(seed=3)) == SamplingParams(seed=3, json_schema=json.dumps(SCHEMA))


class Spelled:
    """A tokenizer with one id a character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(sign) for sign in text]


def test_a_bad_word_is_banned_at_the_start_of_a_text_and_behind_a_space() -> None:
    assert bad_word_ids(Spelled(), ["ab", "ab"]) == ((97, 98), (32, 97, 98))  # type: ignore[arg-type]
