"""Whatever is served is obeyed: random answers of random and of other people's grammars, judged by other judges.

No model: each token is drawn among those that the grammar allows. A schema is refused, or every ended answer is an
instance by the package jsonschema; a regular expression is refused, or every ended answer matches by regress.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date, datetime, time
from email.headerregistry import Address
from enum import Enum
from functools import partial
from ipaddress import IPv4Address
from random import Random
from typing import Literal
from uuid import UUID

import jsonschema
import pytest
import regress
from grammar_filler import BYTES, RandomFiller, disagreement, random_filler, vendored_schemas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from pydantic import BaseModel, Field
from random_schemas import random_pattern, random_schema

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.compose.grammars import vocabulary_of
from tokenspeed.frontend.text.constraints import constraint_of
from tokenspeed.grammar.backend import GrammarRefused, load_backend
from tokenspeed.grammar.source_check import source_fault
from tokenspeed.plane.grammar import GrammarSource
from tokenspeed.settings.model import ModelSettings

LOAD = partial(load_backend, whitespace=2)


@pytest.fixture(scope="module")
def by_bytes() -> RandomFiller:
    return random_filler(BYTES, LOAD)


@pytest.fixture(scope="module")
def by_tokens() -> RandomFiller:
    """Over the vocabulary of the default model."""
    checkpoint = open_checkpoint(resolve_model(ModelSettings(), NoProgress()))
    return random_filler(vocabulary_of(checkpoint, size=checkpoint.config.vocab_size), LOAD)


def faults(filler: RandomFiller, schema: object, rng: Random, *, count: int = 6, most: int = 300) -> list[str] | None:
    """What is wrong with its random answers; None: the schema is refused, in words that name a place or a reason."""
    source = GrammarSource(kind="json_schema", text=json.dumps(schema))
    if fault := source_fault(source):
        assert fault.startswith(("$", "#")) or "subschemas" in fault, fault
        return None
    try:
        answers = list(filler.fill(source, rng, count=count, free=40, most=most))
    except GrammarRefused:
        return None
    wrong = [disagreement(schema, one.text) for one in answers if one.ended]
    return [one for one in wrong if one] + [f"stuck behind {one.text!r}" for one in answers if one.stuck]


def check_random_schemas(filler: RandomFiller, name: str, count: int) -> None:
    served = 0
    for number in range(count):
        rng = Random(f"{name} {number}")
        schema = random_schema(rng)
        found = faults(filler, schema, rng)
        served += found is not None
        assert not found, (schema, found)
    assert count / 3 < served < count


@pytest.mark.contract("GR-10")
def test_random_answers_of_random_schemas_are_valid_or_the_schema_is_refused(by_bytes: RandomFiller) -> None:
    check_random_schemas(by_bytes, "ordinary", 300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_answers_of_a_great_many_random_schemas_are_valid(by_bytes: RandomFiller) -> None:
    check_random_schemas(by_bytes, "slow", 10_000)


@pytest.mark.model
def test_random_tokens_of_the_default_model_are_valid_answers_too(by_tokens: RandomFiller) -> None:
    check_random_schemas(by_tokens, "tokens", 40)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_random_tokens_of_a_great_many_random_schemas_are_valid(by_tokens: RandomFiller) -> None:
    check_random_schemas(by_tokens, "slow tokens", 2000)


def subschemas(name: str, text: str) -> dict[str, object]:
    """A vendored schema, and each of its definitions as a schema of its own."""
    whole = json.loads(text)
    holder = next((one for one in ("$defs", "definitions") if one in whole), "")
    known = whole.get(holder, {})
    told = {key: whole[key] for key in ("$schema",) if key in whole}
    return {name: whole} | {
        f"{name} {key}": {**told, holder: reached(holder, known, key), "$ref": f"#/{holder}/{key}"} for key in known
    }


def reached(holder: str, known: dict[str, object], key: str) -> dict[str, object]:
    """Definitions that one leads to."""
    found, open_ = dict[str, object](), [key]
    while open_:
        name = open_.pop()
        if name not in found and name in known:
            found[name] = known[name]
            open_ += re.findall(rf'"#/{re.escape(holder)}/([^"/]+)', json.dumps(known[name]))
    return found


SERVED = {"changie", "github-discussion", "github-issue-config"}
"""Vendored schemas that are served whole; of the others the first unsupported keyword is named."""


def test_other_people_s_schemas_are_obeyed_or_refused_by_name(by_bytes: RandomFiller) -> None:
    schemas, served = vendored_schemas(), set()
    assert len(schemas) == 27
    for name, text in schemas.items():
        found = faults(by_bytes, json.loads(text), Random(name), count=5, most=600)
        if found is not None:
            served.add(name)
        assert not found, (name, found)
    assert served >= SERVED


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_every_definition_of_other_people_s_schemas_is_obeyed_or_refused_by_name(by_tokens: RandomFiller) -> None:
    served = total = 0
    for name, text in vendored_schemas().items():
        for part, schema in subschemas(name, text).items():
            found = faults(by_tokens, schema, Random(part), count=8, most=800)
            total, served = total + 1, served + (found is not None)
            assert not found, (part, found)
    assert total > 1000
    assert served > total / 4


class Town(BaseModel):
    """A place."""

    zip: str = Field(pattern="^[0-9]{4}$")
    country: Literal["de", "fr"] = "de"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Color(Enum):
    RED = "red"
    GREEN = 2


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=5, description="How they are called.")
    age: int | None = None
    homes: list[Town] = Field(default_factory=list, max_length=2)
    pet: Cat | Dog = Field(discriminator="kind")
    marks: dict[str, float]
    color: Color
    born: date
    pair: tuple[int, str]
    friends: list[Person] = Field(default_factory=list, max_length=1)


@pytest.mark.parametrize("extra", ["forbid", "ignore", "allow"])
def test_what_pydantic_makes_of_a_model_is_served_and_its_answers_are_models(
    by_bytes: RandomFiller, extra: str
) -> None:
    model = type("Person", (Person,), {"model_config": {"extra": extra}})
    schema, ended = model.model_json_schema(), 0
    source = GrammarSource(kind="json_schema", text=json.dumps(schema))
    assert source_fault(source) == ""
    for one in by_bytes.fill(source, Random(extra), count=20, free=150, most=2000):
        if one.ended:
            ended += 1
            assert disagreement(schema, one.text) == ""
            assert plausible(model, one.text)
    assert ended > 5


JUDGES: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "date-time": datetime.fromisoformat,
    "time": time.fromisoformat,
    "ipv4": IPv4Address,
    "uuid": UUID,
    "email": lambda text: Address(addr_spec=text),
    "uri": lambda text: re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:(?:[!#$&-;=?-Z_a-z~\[\]]|%[0-9A-Fa-f]{2})*", text).end(),  # type: ignore[union-attr]
    "hostname": lambda text: [
        re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?", one).end() for one in text.split(".")
    ],  # type: ignore[union-attr]
}


@pytest.mark.parametrize("name", JUDGES)
def test_random_answers_of_a_format_are_what_they_look_like(by_bytes: RandomFiller, name: str) -> None:
    source = GrammarSource(kind="json_schema", text=json.dumps({"type": ["null", "string"], "format": name}))
    assert source_fault(source) == ""
    texts = [
        text
        for one in by_bytes.fill(source, Random(name), count=200, free=20, most=200)
        if one.ended and (text := json.loads(one.text)) is not None
    ]
    assert len(texts) > 10
    for text in texts:
        JUDGES[name](text)


def plausible(model: type[Person], text: bytes) -> bool:
    """JSON lets half of a surrogate pair be escaped, which pydantic's parser does not."""
    whole = re.sub(rb"\\u[dD][89a-fA-F]", rb"\\u00", text)
    return isinstance(model.model_validate_json(whole), Person)


def check_patterns(filler: RandomFiller, name: str, count: int) -> None:
    ended = 0
    for number in range(count):
        rng = Random(f"{name} {number}")
        pattern = random_pattern(rng) + random_pattern(rng)
        source = GrammarSource(kind="regex", text=pattern)
        if source_fault(source):
            continue
        judge = regress.Regex(f"^(?:{pattern})$")
        for one in filler.fill(source, rng, count=3, free=20, most=100):
            assert not one.stuck, (pattern, one)
            if one.ended:
                ended += 1
                assert judge.find(one.text.decode()), (pattern, one)
    assert ended > count


def test_random_answers_of_random_regular_expressions_match_them(by_bytes: RandomFiller) -> None:
    check_patterns(by_bytes, "ordinary", 500)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_answers_of_a_great_many_regular_expressions_match_them(by_bytes: RandomFiller) -> None:
    check_patterns(by_bytes, "slow", 50_000)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(choices=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_random_answers_of_a_choice_are_its_texts(by_bytes: RandomFiller, choices: list[str]) -> None:
    held = constraint_of({"guided_choice": choices})
    assert held is not None
    for one in by_bytes.fill(GrammarSource(kind=held.kind, text=held.text), Random(0), count=4, free=0, most=100):
        assert one.ended
        assert one.text.decode() in choices


SCALARS = st.one_of(
    st.sampled_from([{"type": name} for name in ("null", "boolean", "integer", "number", "string")]),
    st.integers(-1000, 1000).flatmap(
        lambda low: st.integers(low, 1000).map(lambda high: {"type": "integer", "minimum": low, "maximum": high})
    ),
    st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=6)), min_size=1
    ).map(lambda values: {"enum": values}),
)


def wholes(inner: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    """Schemas of which the grammar accepts every instance, its names in their order."""
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(2, 4)).map(
        lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[2]}
    )
    objects = st.dictionaries(st.text(max_size=4), inner, min_size=1, max_size=3).flatmap(
        lambda known: st.sets(st.sampled_from(sorted(known))).map(
            lambda needed: {
                "type": "object",
                "properties": known,
                "required": sorted(needed),
                "additionalProperties": False,
            }
        )
    )
    return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda made: {"anyOf": made}))


def instances(schema: dict[str, object]) -> st.SearchStrategy[object]:
    """Of one of those; names in the order of the schema."""
    match schema:
        case {"anyOf": list(branches)}:
            return st.one_of([instances(one) for one in branches])
        case {"type": "array", "items": dict(items), "minItems": int(least), "maxItems": int(most)}:
            return st.lists(instances(items), min_size=least, max_size=most)
        case {"type": "object", "properties": dict(known), "required": list(needed)}:
            there = {name: st.just(True) if name in needed else st.booleans() for name in known}
            values = st.fixed_dictionaries({name: instances(inner) for name, inner in known.items()})
            return st.tuples(values, st.fixed_dictionaries(there)).map(
                lambda made: {name: made[0][name] for name in known if made[1][name]}
            )
        case _:
            return from_schema(schema)


def accepts(filler: RandomFiller, source: GrammarSource, text: str) -> bool:
    matcher = filler.backend.compile(source).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(BYTES.stops[0])


@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), schema=st.recursive(SCALARS, wholes, max_leaves=6))
def test_every_valid_instance_is_accepted_where_the_grammar_is_not_narrower(
    by_bytes: RandomFiller, data: st.DataObject, schema: dict[str, object]
) -> None:
    value = data.draw(instances(schema))
    jsonschema.validate(value, schema)
    text = json.dumps(value, ensure_ascii=False)
    assert accepts(by_bytes, GrammarSource(kind="json_schema", text=json.dumps(schema)), text), text
