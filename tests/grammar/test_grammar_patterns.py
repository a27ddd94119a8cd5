"""Sets of characters, and patterns in which they are spelled out."""

from __future__ import annotations

import itertools
import json
import re
from random import Random

import pytest
import regress
from grammar_filler import BYTES
from random_schemas import random_pattern

from tokenspeed.grammar.backend import TokenMatcher, XgrammarBackend, load_backend
from tokenspeed.grammar.char_class import ESCAPED_BY_JSON, LAST, Chars, class_text, complement, union, without
from tokenspeed.grammar.regex import regex_fault, spelled_out
from tokenspeed.plane.grammar import GrammarSource

EDGES = (0, 1, 0x1F, 0x20, 0x22, 0x5C, 0x5D, 0xFFFE, 0xFFFF, 0x10000, LAST - 1, LAST)
TEXTS = ("", "a", "Z0", '"', "\\", "\n", "\t", "é", "日", "\u2028", "\xa0", "\U0001f600", "ab", "a b", "9-_", "/.:")


def codes(chars: Chars) -> set[int]:
    return {one for one in EDGES if any(first <= one <= last for first, last in chars)}


def test_sets_of_characters_behave_as_sets_do() -> None:
    rng = Random(1)
    everything = set(EDGES)
    for _ in range(200):
        one, other = (
            union((first, last) for first, last in [sorted(rng.choices(EDGES, k=2)) for _ in range(rng.randrange(4))])
            for _ in range(2)
        )
        assert codes(complement(one)) == everything - codes(one)
        assert codes(without(one, other)) == codes(one) - codes(other)
        assert codes(union((*one, *other))) == codes(one) | codes(other)
        assert complement(complement(one)) == one
        if one and complement(one):
            judge = regress.Regex(f"^{class_text(one)}$", "u")
            assert {code for code in EDGES if judge.find(chr(code))} == codes(one)


def test_a_pattern_that_is_spelled_out_matches_what_it_did() -> None:
    served = 0
    for number in range(400):
        pattern = random_pattern(Random(f"spelled {number}"))
        if regex_fault(pattern):
            continue
        served += 1
        before, after = (regress.Regex(f"^(?:{one})$") for one in (pattern, spelled_out(pattern)))
        quoted = regress.Regex(f"^(?:{spelled_out(pattern, quoted=True)})$")
        for text in TEXTS:
            matches = before.find(text) is not None
            assert (after.find(text) is not None) is matches, (pattern, text)
            if not regex_fault(pattern, quoted=True):
                plain = not any(first <= ord(sign) <= last for sign in text for first, last in ESCAPED_BY_JSON)
                assert (quoted.find(text) is not None) is (matches and plain), (pattern, text)
    assert served > 200


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"a.[.]\.", r"a[^\u000a\u000d\u2028-\u2029][.]\."),
        (r"\d[a-c]", r"\d[a-c]"),
        ("(a", "(a"),
    ],
)
def test_outside_of_json_only_dots_are_spelled_out(pattern: str, wanted: str) -> None:
    assert spelled_out(pattern) == wanted


def test_inside_of_json_no_set_has_what_is_written_with_an_escape() -> None:
    assert spelled_out(r"[!-\]][^a]\d", quoted=True) == (
        r"[\u0021\u0023-\u005b\u005d][^\u0000-\u001f\u0022\u005c\u0061][\u0030-\u0039]"
    )


SHORT = ["".join(signs) for size in range(5) for signs in itertools.product("abx", repeat=size)]
REPEATED = ("", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}", "{2,}", "??", "{1,2}?")


def small_pattern(rng: Random, depth: int = 0) -> str:
    """Few signs and many groups: whether they are put together rightly shows in short texts."""
    kind = rng.random()
    if depth > 2 or kind < 0.35:
        return rng.choice(["a", "b", "x", "[ab]", "[^a]", "."]) + rng.choice(REPEATED)
    if kind < 0.6:
        return small_pattern(rng, depth + 1) + small_pattern(rng, depth + 1)
    if kind < 0.75:
        return f"({small_pattern(rng, depth + 1)}|{small_pattern(rng, depth + 1)})"
    return f"(?P<n{rng.randrange(10**6)}>{small_pattern(rng, depth + 1)}){rng.choice(REPEATED)}"


def takes(matcher: TokenMatcher, text: str) -> bool:
    matcher.reset()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(BYTES.stops[0])


@pytest.fixture(scope="module")
def backend() -> XgrammarBackend:
    return load_backend(BYTES, whitespace=0)


def test_a_compiled_pattern_accepts_exactly_what_it_matches_among_all_short_texts(backend: XgrammarBackend) -> None:
    patterns = [r"a(?:xb{1,3})?x", "a(xb+)?x", "(x{1,2}|)b", "(^a|b$)", "x|^a"]
    patterns += [small_pattern(Random(f"small {number}")) for number in range(60)]
    for pattern in patterns:
        assert regex_fault(pattern, quoted=True) == ""
        plain = backend.compile(GrammarSource(kind="regex", text=pattern)).matcher()
        schema = json.dumps({"type": "string", "pattern": pattern})
        quoted = backend.compile(GrammarSource(kind="json_schema", text=schema)).matcher()
        wanted = [text for text in SHORT if re.fullmatch(pattern, text)]
        assert [text for text in SHORT if takes(plain, text)] == wanted, pattern
        assert [text for text in SHORT if takes(quoted, f'"{text}"')] == wanted, pattern
