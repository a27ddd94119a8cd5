"""What of JSON Schema and regular expressions is served, and what is refused by name."""

from __future__ import annotations

import json
import re

import pytest

from tokenspeed.grammar.regex import regex_fault
from tokenspeed.grammar.schema import MAX_DEPTH, schema_fault
from tokenspeed.grammar.source_check import source_fault
from tokenspeed.plane.grammar import GrammarSource


def deep(levels: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, tuple[object, str]] = {
    "false": (False, "accepts no value"),
    "a number": (3, "must be an object or a boolean"),
    "an unknown type": ({"type": "strin"}, r"\$.type: got 'strin'"),
    "an unknown keyword": ({"type": "string", "minLen": 3}, r"\$.minLen: this keyword is not supported"),
    "not": ({"not": {"type": "integer"}}, r"\$.not"),
    "if": ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "not supported"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, r"\$.uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, r"\$.contains"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, r"\$.multipleOf"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "items as a list": ({"type": "array", "items": [{"type": "integer"}]}, r"\$.items"),
    "an empty enum": ({"enum": []}, r"\$.enum"),
    "an enum that contradicts its type": ({"type": "string", "enum": [1]}, "1 is not of type 'string'"),
    "two schemas in allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, r"\$.allOf"),
    "keywords beside anyOf": ({"type": "object", "properties": {}, "anyOf": [{"type": "object"}]}, r"\$.properties"),
    "keywords beside a reference": ({"$defs": {"n": {}}, "$ref": "#/$defs/n", "minimum": 5}, r"\$.minimum"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, r"\$.oneOf"),
    "a reference elsewhere": ({"$ref": "https://example.com/s"}, r"\$.\$ref"),
    "a reference to nothing": ({"$ref": "#/$defs/zz"}, "points to nothing"),
    "a reference to itself": ({"$ref": "#"}, "leads back to itself"),
    "references in a ring": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "leads back to itself",
    ),
    "a bound without a type": ({"minimum": 3}, r"\$.minimum: without a type"),
    "a bound beyond any number": ({"type": "integer", "maximum": 1e300}, r"\$.maximum"),
    "pattern and length": ({"type": "string", "pattern": "^a$", "maxLength": 2}, r"\$.pattern"),
    "look-ahead in a pattern": ({"type": "string", "pattern": "(?=a)a"}, r"\$.pattern: .*look-ahead"),
    "an unknown format": ({"type": "string", "format": "zzz"}, r"\$.format"),
    "an endless string": ({"type": "string", "maxLength": 100_000}, r"\$.maxLength"),
    "contradicting lengths": ({"type": "string", "minLength": 3, "maxLength": 2}, "3 is more than maxLength, 2"),
    "a required name that is no property": ({"type": "object", "required": ["q"]}, "'q' is none of the properties"),
    "a fault deep inside": (
        {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}},
        r"\$.properties.a.items.not",
    ),
    "too deep": (deep(MAX_DEPTH + 2), "deep"),
    "too many values": ({"enum": list(range(20_000))}, "values in all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_grammar_could_not_hold_is_refused_by_name_and_place(name: str) -> None:
    schema, wanted = REFUSED[name]
    fault = schema_fault(json.dumps(schema))
    assert fault
    assert re.search(wanted, fault), fault


@pytest.mark.parametrize("text", ["{", "", '{"type": NaN}', "[" * 100_000, '"\\ud800"'])
def test_what_is_no_schema_is_refused_and_raises_nothing(text: str) -> None:
    assert schema_fault(text)


SERVED: tuple[object, ...] = (
    True,
    {},
    {"type": "object"},
    {"type": ["string", "null"], "description": "a name", "title": "Name", "default": None},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
        ]
    },
    {"type": "string", "enum": ["a", "b"]},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    {"$defs": {"a/b": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
    deep(MAX_DEPTH - 1),
)


@pytest.mark.parametrize("schema", SERVED, ids=str)
def test_what_a_grammar_holds_is_served(schema: object) -> None:
    assert schema_fault(json.dumps(schema)) == ""


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"\bfoo", "not supported"),
        (r"(?=a)b", "look-ahead"),
        (r"(?<!a)b", "look-behind"),
        (r"(a)\1", "back reference"),
        (r"a^b", "not at the beginning"),
        (r"a$b", "not at the end"),
        (r"(?i)a", "flags"),
        (r"\p{L}", "Unicode class"),
        (r"[a", "without"),
        (r"a{99999}", "repeats"),
        ("a\\", "backslash"),
    ],
)
def test_what_a_regular_expression_could_not_hold_is_refused(pattern: str, wanted: str) -> None:
    assert wanted in regex_fault(pattern)


@pytest.mark.parametrize("pattern", [r"^a$", r"(^a|b$)", r"[^]a]+", r"(?:ab|cd){2,5}-[0-9]{3}", r"(?P<x>a)", r"[$^]"])
def test_regular_expressions_that_are_regular_are_served(pattern: str) -> None:
    assert regex_fault(pattern) == ""


def test_a_structural_tag_is_looked_through_for_schemas_and_patterns() -> None:
    def tag(content: object) -> GrammarSource:
        whole = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
        return GrammarSource(kind="structural_tag", text=json.dumps(whole))

    assert source_fault(tag({"type": "json_schema", "json_schema": {"type": "integer"}})) == ""
    thirds = {"type": "integer", "multipleOf": 3}
    assert "multipleOf" in source_fault(tag({"type": "json_schema", "json_schema": thirds}))
    assert "look-ahead" in source_fault(tag({"type": "regex", "pattern": "(?=a)"}))


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_text_that_no_grammar_can_have_is_refused(kind: str) -> None:
    assert "NUL" in source_fault(GrammarSource(kind=kind, text="a\x00b"))
    assert "surrogate" in source_fault(GrammarSource(kind=kind, text="a\ud800b"))
