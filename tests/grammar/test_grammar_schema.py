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
    "branches in a ring": ({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}, "leads back to itself"),
    "a percent sign in a reference": ({"$defs": {"a b": {}}, "$ref": "#/$defs/a%20b"}, "percent"),
    "an $id below the root": (
        {
            "$defs": {"n": {"type": "string"}},
            "type": "array",
            "items": {"$id": "http://a.b/c", "$ref": "#/$defs/n"},
        },
        r"\$.items.\$id",
    ),
    "a schema for other names beside properties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        r"\$.additionalProperties: a schema beside properties",
    ),
    "several patterns for names": (
        {"type": "object", "patternProperties": {"^a.*$": {"type": "integer"}, "^.*b$": {"type": "string"}}},
        r"\$.patternProperties: more than one",
    ),
    "names and no property": (
        {"type": "object", "propertyNames": {"pattern": "^a$"}, "additionalProperties": False},
        r"\$.propertyNames",
    ),
    "a count of names that may repeat": ({"type": "object", "minProperties": 2}, r"\$.minProperties"),
    "a count without a type": ({"minItems": 2}, r"\$.minItems: without a type"),
    "bounds without a number of few digits between": (
        {"type": "array", "items": {"type": "number", "minimum": 0.1234567, "maximum": 0.1234568}},
        r"\$.items: no number with at most 6 digits",
    ),
    "no whole number": ({"type": "integer", "minimum": 1.5}, r"\$.minimum: got 1.5, must be a whole number"),
    "an integer of more than 64 bits": ({"enum": [[2**63]]}, "beyond 64 bits"),
    "prefixItems before they were known": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [{}], "items": False},
        r"\$.prefixItems: draft-07",
    ),
    "oneOf of what is no object for sure": (
        {"oneOf": [{"properties": {"a": {"type": "integer"}}}, {"type": "string"}]},
        r"\$.oneOf",
    ),
    "a quote in a pattern": ({"type": "string", "pattern": '^"$'}, r"U\+0022 at character 1, which JSON escapes"),
    "a backslash in a pattern": ({"type": "string", "pattern": r"a\\"}, r"U\+005C"),
    "a line end in a pattern": ({"type": "string", "pattern": r"a\n"}, r"U\+000A"),
    "a class of quotes": (
        {"type": "object", "propertyNames": {"pattern": '["-"]'}},
        "only characters that JSON escapes",
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
        (r"x(^a)", "not at the beginning"),
        (r"(a$|b)c", "not at the end"),
        (r"((^a)){2}", "repeats"),
        (r"^*a", "not at the beginning"),
        (r"[^]a]", "right behind"),
        (r"a++", "itself repeated"),
        (r"a{3}{2}", "itself repeated"),
        (r"\x22a", r"\u and four"),
        (r"\u12", "four hexadecimal"),
        (r"\a", "not supported"),
        (r"\0", "not supported"),
        (r"(?P<x", "does not end"),
        (r"[z-a]", "does not rise"),
        (r"[a-\d]", "does not rise"),
        (r"[^\s\S]", "no characters"),
    ],
)
def test_what_a_regular_expression_could_not_hold_is_refused(pattern: str, wanted: str) -> None:
    assert wanted in regex_fault(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a$",
        r"(^a|b$)",
        r"[^\]a]+",
        r"(?:ab|cd){2,5}-[0-9]{3}",
        r"(?P<x>a)",
        r"[$^]",
        r"x|(^a)",
        "a*?b",
        r"\$\u0041",
        ".",
    ],
)
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
    unordered = {"type": "json_schema", "json_schema": {"type": "object"}, "any_order": True}
    assert "any_order" in source_fault(tag(unordered))


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_text_that_no_grammar_can_have_is_refused(kind: str) -> None:
    assert "NUL" in source_fault(GrammarSource(kind=kind, text="a\x00b"))
    assert "surrogate" in source_fault(GrammarSource(kind=kind, text="a\ud800b"))
