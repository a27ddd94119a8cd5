"""Constrained requests through a whole engine with random weights: what comes out satisfies the grammar."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator

import attrs
import pytest

from tokenspeed import Engine, SamplingOptions
from tokenspeed.errors import RequestError
from tokenspeed.settings.load import load_settings

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
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
)
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
    assert len(value["name"]) <= 8
    assert 0 <= value["age"] <= 120
    assert set(value["tags"]) <= {"red", "green"} and len(value["tags"]) <= 2
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
    done = engine.generate("seeded", attrs.evolve(held(json_schema=json.dumps(PERSON)), seed=11))[0]
    with Engine(load_settings(sets=BASE, environ={})) as other:
        assert other.generate("seeded", attrs.evolve(held(json_schema=json.dumps(PERSON)), seed=11))[0].text == done.text
