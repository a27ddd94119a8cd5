"""Constrained requests through a whole engine with random weights: what comes out satisfies the grammar."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import attrs
import pytest

from tokenspeed import Engine, SamplingOptions
from tokenspeed.errors import RequestError
from tokenspeed.settings.load import load_settings

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
HOT = SamplingOptions(max_tokens=120, temperature=1.0)
BASE = (
    "model.source=random:tiny-llama",
    "model.max_len_tokens=256",
    "scheduler.max_num_seqs=8",
    "device.threads=1",
    "device.kv_pool_tokens=4096",
    "grammar.timeout_s=600",
    "grammar.compile_s=120",
)
RECOMPUTE: tuple[str, ...] = ()
IMAGES = ("cache.host_gib=0.05", "cache.images=4")
WAYS = {
    "the forward fills": (),
    "the forward fills, without overlap": ("scheduler.overlap=false",),
    "eager": ("grammar.fill=eager",),
    "futures": ("device.executor=futures",),
}


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(load_settings(sets=(*BASE, *WAYS[request.param]), environ={})) as running:
        yield running


def held(**grammar: str) -> SamplingOptions:
    return attrs.evolve(HOT, **grammar)


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "ok"]
    assert re.fullmatch("[a-z]{1,8}", value["name"])
    assert 0 <= value["age"] <= 120
    assert set(value["tags"]) <= {"red", "green"}
    assert len(value["tags"]) <= 2
    assert isinstance(value["ok"], bool)


@pytest.mark.contract("GR-10", "DO-10", "RA-10")
def test_a_mixed_batch_obeys_each_row_s_own_grammar_and_leaves_the_others_alone(engine: Engine) -> None:
    alone = engine.generate("plain prompt", attrs.evolve(HOT, max_tokens=40, seed=5, ignore_eos=True))[0]

    async def all_at_once() -> list[str]:

        async def one(options: SamplingOptions) -> tuple[str, str]:
            done = (await engine.generate_async(["plain prompt"], options))[0]
            return done.text, done.finish_reason

        schema = [one(attrs.evolve(held(json_schema=json.dumps(PERSON)), seed=seed)) for seed in range(3)]
        regex = [one(attrs.evolve(held(regex=r"(ab|cd){2,5}-[0-9]{3}"), seed=seed)) for seed in range(2)]
        plain = one(attrs.evolve(HOT, max_tokens=40, seed=5, ignore_eos=True))
        done = await asyncio.gather(*schema, *regex, plain)
        assert [reason for _, reason in done[:5]] == ["stop"] * 5
        return [text for text, _ in done]

    texts = asyncio.run(all_at_once())
    for text in texts[:3]:
        check_person(text)
    for text in texts[3:5]:
        assert re.fullmatch(r"(ab|cd){2,5}-[0-9]{3}", text)
    assert texts[5] == alone.text


@pytest.mark.contract("DO-10", "DO-5")
def test_the_same_seed_gives_the_same_constrained_tokens_whatever_fills_and_at_either_depth(engine: Engine) -> None:
    options = attrs.evolve(held(json_schema=json.dumps(PERSON)), seed=11)
    done = engine.generate("seeded", options)[0]
    check_person(done.text)
    assert engine.generate(["seeded", "another"], options)[0].token_ids == done.token_ids
    assert SEEN.setdefault("seeded", done.token_ids) == done.token_ids


SEEN: dict[str, tuple[int, ...]] = {}
"""What the engine of another way gave."""


def test_choices_of_one_request_each_satisfy_the_grammar(engine: Engine) -> None:
    done = engine.generate("several", attrs.evolve(held(json_schema=json.dumps(PERSON)), n=3, seed=1))[0]
    assert len(done.choices) == 3
    for choice in done.choices:
        check_person(choice.text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ({"regex": "yes|no"}, "yes|no"),
        ({"ebnf": 'root ::= "a" b\nb ::= "b" | "c" b'}, "ac*b"),
        ({"json_schema": '{"enum": ["x", 3, null]}'}, '"x"|3|null'),
        ({"json_schema": '{"type": "string", "pattern": "^[a-c]{2}[0-9]$"}'}, '"[a-c]{2}[0-9]"'),
    ],
)
def test_every_kind_of_grammar_holds_a_greedy_and_a_random_answer(
    engine: Engine, grammar: dict[str, str], text: str
) -> None:
    for temperature in (0.0, 1.3):
        done = engine.generate("x", attrs.evolve(held(**grammar), temperature=temperature, seed=3))[0]
        assert re.fullmatch(text, done.text), done.text
        assert done.finish_reason == "stop"


def test_min_tokens_ignore_eos_and_bad_words_give_way_to_the_grammar(engine: Engine) -> None:
    options = attrs.evolve(held(regex="ab"), min_tokens=20, ignore_eos=True, bad_words=((ord("b"),),))
    done = engine.generate("x", options)[0]
    assert (done.text, done.finish_reason) == ("ab", "stop")


def test_a_length_limit_cuts_an_answer_in_the_middle_of_its_grammar(engine: Engine) -> None:
    done = engine.generate("x", attrs.evolve(held(regex="[ab]{50}"), max_tokens=5))[0]
    assert re.fullmatch("[ab]{5}", done.text)
    assert done.finish_reason == "length"


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no JSON": ({"json_schema": "{"}, "is not JSON"),
    "unsupported keyword": ({"json_schema": '{"type": "integer", "multipleOf": 3}'}, "multipleOf"),
    "contradicting bounds": ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "minimum"),
    "broken regex": ({"regex": "(ab"}, "regex"),
    "broken EBNF": ({"ebnf": "root ::= undefined_rule"}, "ebnf"),
    "broken tag": ({"structural_tag": '{"type": "structural_tag", "format": {"type": "zzz"}}'}, "structural_tag"),
    "two at once": ({"regex": "a", "ebnf": 'root ::= "a"'}, "at most one"),
}


@pytest.mark.contract("GR-3")
def test_what_is_no_grammar_is_refused_and_neighbours_and_followers_are_unaffected(engine: Engine) -> None:
    async def together() -> None:
        good = asyncio.ensure_future(engine.generate_async(["x"], held(regex="[ab]{30}")))
        for grammar, wanted in REFUSED.values():
            with pytest.raises(RequestError, match=wanted) as refusal:
                await engine.generate_async(["x"], held(**grammar))
            assert refusal.value.status == 400
        assert re.fullmatch("[ab]{30}", (await good)[0].text)

    asyncio.run(together())
    assert engine.generate("x", held(regex="ok"))[0].text == "ok"


@pytest.mark.contract("GR-10")
@pytest.mark.parametrize(
    ("way", "more"),
    [
        pytest.param("the forward fills", RECOMPUTE, id="forward-recompute"),
        pytest.param("the forward fills", IMAGES, id="forward-images"),
        pytest.param("futures", RECOMPUTE, id="futures-recompute"),
        pytest.param("futures", IMAGES, id="futures-images", marks=pytest.mark.slow),
        pytest.param("eager", RECOMPUTE, id="eager-recompute", marks=pytest.mark.slow),
        pytest.param("eager", IMAGES, id="eager-images", marks=pytest.mark.slow),
    ],
)
def test_answers_satisfy_their_grammar_after_retractions(way: str, more: tuple[str, ...]) -> None:
    small = [one for one in BASE if "kv_pool" not in one]
    settings = load_settings(sets=(*small, "device.kv_pool_tokens=448", *WAYS[way], *more), environ={})
    options = attrs.evolve(held(regex="([a-f]{4}-){20}end"), max_tokens=200)
    with Engine(settings) as engine:
        done = engine.generate(["p" * 20 + str(one) for one in range(6)], attrs.evolve(options, seed=2))
        preempted = engine.rank.loop.request_stats
        assert preempted is not None
    for one in done:
        assert re.fullmatch("([a-f]{4}-){20}end", one.text), one.text
