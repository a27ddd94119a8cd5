"""What compiled grammars accept, byte by byte, against instances that are known to be valid or not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tokenspeed.grammar.backend import GrammarRefused, XgrammarBackend, load_backend
from tokenspeed.grammar.schema import schema_fault
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource

END = 256
BYTES = Vocabulary(tokens=(*(bytes([one]) for one in range(256)), b""), stops=(END,))


@pytest.fixture(scope="module")
def backend() -> XgrammarBackend:
    return load_backend(BYTES, whitespace=2)


def accepts(backend: XgrammarBackend, kind: str, grammar: str, text: str) -> bool:
    matcher = backend.compile(GrammarSource(kind=kind, text=grammar)).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(END) and matcher.ended()


INT, TEXT = {"type": "integer"}, {"type": "string"}
PAIR = {"type": "object", "properties": {"a": INT, "b": TEXT}, "required": ["b"], "additionalProperties": False}
CASES: list[tuple[object, list[str], list[str]]] = [
    (True, ["1", '"a"', '{"a": [1, null]}'], ["", "{", "tru"]),
    ({"type": "object"}, ["{}", '{"a": 1, "b": {"c": []}}'], ["1", "[]"]),
    ({"type": "array"}, ["[]", '[1, "a", {}]'], ["{}", "[1,]"]),
    (INT, ["0", "-3", "1234567"], ["1.5", "01", "+1", '"1"']),
    ({"type": "number"}, ["1.5", "-2", "1e5"], ["01", ".", "NaN"]),
    ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "0"]),
    ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
    ({"const": 'é"\n'}, ['"é\\"\\n"'], ['"e"']),
    ({"type": "integer", "minimum": 3, "maximum": 120}, ["3", "99", "120"], ["2", "121", "-5"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12}, ["4", "11"], ["3", "12"]),
    ({"type": "number", "minimum": 0.5, "maximum": 2}, ["0.5", "1.25", "2"], ["0.4", "2.1", "-1"]),
    ({"type": "number", "minimum": 0.12345678}, ["0.123457", "1"], ["0.123456", "0.1"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "1", "0.0", "1.0"]),
    ({"type": "string"}, ['"a\\"b\\n\\u1234é"', '""'], ['"a', '"a\nb"', '"\x01"', '"\t"']),
    (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"ab"', '"abc"', '"éé"'],
        ['"a"', '"abcd"', '"a\x02"', '"a\tb"'],
    ),
    ({"type": "string", "pattern": "^[a-c]+-[0-9]{2}$"}, ['"ab-12"'], ['"ab-1"', '"xab-12"', '"ab-123"']),
    ({"type": "string", "pattern": "^.{3}$"}, ['"abc"'], ['"a"b"', '"ab"', '"a\nb"']),
    ({"type": "string", "pattern": "^[^a]{3}$"}, ['"bcd"'], ['"b"d"', '"abc"', '"b\nd"']),
    (
        {"type": "string", "pattern": r"^(é|\S).[^é]$"},
        ['"éab"', '"aéb"'],
        ['"\\"', '"\\nb"', '"a""', '"ab\\"', '"ab\n"'],
    ),
    ({"type": "object", "patternProperties": {"^é.$": INT}}, ['{"éa": 1}'], ['{"é\\": 1}', '{"é"": 1}']),
    (
        {"type": "string", "format": "date"},
        ['"2020-01-31"', '"2024-02-29"', '"2000-02-29"'],
        ['"x"', '"2020-13-01"', '"2023-02-29"', '"1900-02-29"', '"2021-04-31"'],
    ),
    ({"type": "string", "format": "date-time"}, ['"2020-01-31T10:00:00Z"'], ['"2020-01-31"']),
    ({"type": "string", "format": "time"}, ['"10:00:00Z"'], ['"25:00:00Z"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"1.2.3"', '"256.1.1.1"', '"1.2.3.04"']),
    ({"type": "string", "format": "email"}, ['"someone@example.com"'], ['"x"']),
    ({"type": "string", "format": "uri"}, ['"http://a.b/c"'], ['"x y"']),
    ({"type": "string", "format": "hostname"}, ['"a.example"'], ['"x y"']),
    ({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1,2,3]", '["a"]']),
    ({"type": "array", "prefixItems": [INT, TEXT], "minItems": 2}, ['[1, "a"]'], ['["a", 1]', "[1]"]),
    ({"type": "array", "prefixItems": [INT], "items": TEXT}, ['[1, "a", "b"]'], ["[1, 2]"]),
    ({"type": "array", "prefixItems": [INT], "items": False, "minItems": 1}, ["[1]"], ["[1, 2]", "[]"]),
    (PAIR, ['{"a": 1, "b": "x"}', '{"b": "x"}'], ["{}", '{"a": 1}', '{"b": "x", "c": 1}', '{"b": 1}']),
    ({"type": "object", "additionalProperties": INT}, ['{"z": 1}', "{}"], ['{"z": "a"}']),
    (
        {"type": "object", "properties": {"a": INT}, "additionalProperties": True},
        ['{"a": 1}', "{}"],
        ['{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"z": 1}'],
    ),
    (
        {"type": "object", "properties": {"additionalProperties": TEXT, "properties": PAIR}},
        ['{"additionalProperties": "x", "properties": {"b": ""}}'],
        ['{"additionalProperties": 1}', '{"properties": {"b": "", "z": 1}}'],
    ),
    ({"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2}, ['{"a": 1}'], ["{}"]),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 1}, ['{"a": 1}', '{"b": 1}'], ["{}"]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ['{"a": 1}'], ['{"A": 1}']),
    (
        {"type": "object", "patternProperties": {"^x[0-9]$": INT}, "additionalProperties": False},
        ['{"x1": 1}'],
        ['{"y": 1}', '{"x1": "s"}'],
    ),
    ({"anyOf": [INT, TEXT]}, ["1", '"a"'], ["null"]),
    ({"oneOf": [INT, TEXT]}, ["1", '"a"'], ["null"]),
    ({"allOf": [INT]}, ["1"], ['"a"']),
    ({"$defs": {"a/b": INT}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}}, ["[1]"], ['["a"]']),
    (
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False},
        ["{}", '{"c": {"c": {}}}'],
        ['{"c": 1}'],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=[json.dumps(case[0])[:60] for case in CASES])
def test_a_served_schema_accepts_valid_instances_and_no_invalid_ones(
    backend: XgrammarBackend, schema: object, valid: list[str], invalid: list[str]
) -> None:
    text = json.dumps(schema)
    assert schema_fault(text) == ""
    assert [one for one in valid if not accepts(backend, "json_schema", text, one)] == []
    assert [one for one in invalid if accepts(backend, "json_schema", text, one)] == []


def test_whitespace_between_the_tokens_of_json_is_bounded(backend: XgrammarBackend) -> None:
    grammar = '{"type": "array", "items": {"type": "integer"}}'
    assert accepts(backend, "json_schema", grammar, "[ 1 , 2 ]")
    assert not accepts(backend, "json_schema", grammar, "[   1]")


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("regex", "(ab"),
        ("ebnf", "root ::= nothing"),
        ("ebnf", "no grammar at all"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "zzz"}}'),
        ("zzz", "x"),
        ("ebnf", "root ::= a\na ::= a"),
        ("json_schema", '{"const": "\\ud800"}'),
    ],
)
def test_what_is_no_grammar_is_refused_with_words(backend: XgrammarBackend, kind: str, grammar: str) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        backend.compile(GrammarSource(kind=kind, text=grammar))
    assert str(refusal.value)
    assert ".cc:" not in str(refusal.value)
    assert "Check failed" not in str(refusal.value)


def test_a_regular_expression_holds_the_whole_text(backend: XgrammarBackend) -> None:
    assert accepts(backend, "regex", "(ab|cd){2}", "abcd")
    assert accepts(backend, "regex", "^a[^b]\\d$", "ac1")
    assert not accepts(backend, "regex", "(ab|cd){2}", "xabcd")
    assert not accepts(backend, "regex", "^ab$", "abc")


def test_a_dot_matches_no_end_of_a_line_alone_and_inside_a_structural_tag(backend: XgrammarBackend) -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a.[.]"}}
    for kind, grammar in (("regex", "a.[.]"), ("structural_tag", json.dumps(tag))):
        assert accepts(backend, kind, grammar, "aé.")
        assert not accepts(backend, kind, grammar, "a\n.")
        assert not accepts(backend, kind, grammar, "abc")


def test_an_object_in_a_structural_tag_is_closed_as_one_alone_is(backend: XgrammarBackend) -> None:
    schema = {"type": "object", "properties": {"a": INT}, "additionalProperties": {}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    assert accepts(backend, "structural_tag", json.dumps(tag), '{"a": 1}')
    assert not accepts(backend, "structural_tag", json.dumps(tag), '{"\\u0061": "x"}')


@pytest.mark.parametrize(
    "wrong", [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80"], ids=bytes.hex
)
def test_bytes_that_are_no_utf_8_are_not_allowed_where_any_character_is(backend: XgrammarBackend, wrong: bytes) -> None:
    """A surrogate, two long forms, a code beyond the last: at one of their bytes the mask has no bit for it."""
    words = np.zeros((1, 9), dtype=np.int32)
    for kind, grammar, begin in (("json_schema", '{"type": "string"}', b'"'), ("regex", r"[\s\S]*", b"")):
        matcher = backend.compile(GrammarSource(kind=kind, text=grammar)).matcher()
        allowed = []
        for byte in begin + wrong:
            matcher.fill(words, 0)
            allowed.append(bool(words[0, byte // 32] >> byte % 32 & 1))
            if not matcher.accept(byte):
                break
        assert not all(allowed)
        matcher.reset()
        assert all(matcher.accept(byte) for byte in begin + "é日\ud7ff\U0010ffff".encode())


def in_a_tag(backend: XgrammarBackend, schema: object, text: str) -> bool:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    return accepts(backend, "structural_tag", json.dumps(tag), f"<a>{text}</a>")


def test_a_schema_in_a_structural_tag_is_held_as_strictly_as_one_alone(backend: XgrammarBackend) -> None:
    short, items = {"type": "string", "maxLength": 3}, {"type": "array", "items": INT}
    assert in_a_tag(backend, short, '"abc"')
    assert not in_a_tag(backend, short, '"a\tb"')
    assert not in_a_tag(backend, short, '"\x01"')
    assert in_a_tag(backend, items, "[ 1 , 2 ]")
    assert not in_a_tag(backend, items, "[   1]")
    assert not in_a_tag(backend, {"type": "string", "pattern": "^a(x.+)?b$"}, '"axb"')
    assert not in_a_tag(backend, {"type": "string", "format": "date"}, '"2023-02-29"')


def test_without_whitespace_json_has_one_form_and_tags_have_next_to_none() -> None:
    backend = load_backend(BYTES, whitespace=0)
    items = {"type": "array", "items": INT}
    assert accepts(backend, "json_schema", json.dumps(items), "[1, 2]")
    assert not accepts(backend, "json_schema", json.dumps(items), "[ 1, 2]")
    assert in_a_tag(backend, items, "[1, 2]")
    assert not in_a_tag(backend, items, "[1,  2]")
