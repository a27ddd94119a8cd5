"""Drive a rank with prompts whose greedy tokens are known, and say where it differs from them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import attrs

from tokenspeed.compose.engine import RankEngine
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.testing import RecordingLink

REFERENCES = Path(__file__).parents[1] / "equality" / "reference"
MARGIN = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""

REPEATED = 4


@attrs.frozen
class Prompt:
    """A prompt and its reference: tokens, and the distance of the two best logits at each.

    Attributes:
        top: of each token the likeliest ids with their log-probabilities, best first; [] where the file has none.
    """

    rid: str
    ids: list[int]
    expected: list[int]
    margins: list[float]
    top: list[dict[int, float]] = attrs.field(factory=list)


def read_prompts(name: str) -> list[Prompt]:
    """The prompts of reference file `name`."""
    data = json.loads((REFERENCES / name).read_text())
    return [
        Prompt(
            rid=f"p{i}",
            ids=entry["prompt"],
            expected=entry["tokens"],
            margins=entry["margins"],
            top=[
                dict(zip(*both, strict=True))
                for both in zip(entry.get("top_ids", []), entry.get("top_logprobs", []), strict=True)
            ],
        )
        for i, entry in enumerate(data["prompts"])
    ]


@attrs.define
class Counters:
    """What shows that a run did what its name says."""

    overlapped: int = 0
    mixed: int = 0
    partial_chunks: int = 0
    cached_tokens: int = 0
    preempted: int = 0


def drive(engine: RankEngine, link: RecordingLink, wanted: list[Prompt], *, seed: int) -> Counters:
    """Send every prompt at a random round, and the first few long ones once more at the end."""
    rng, counters = random.Random(seed), Counters()
    loop, table = engine.loop, engine.loop.table
    new_tokens = len(wanted[0].expected)
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    waiting = [(prompt.rid, prompt.ids) for prompt in wanted]
    rng.shuffle(waiting)
    again = [(f"{prompt.rid}-again", prompt.ids) for prompt in wanted if len(prompt.ids) > 40][:REPEATED]
    while waiting or again or table.live:
        if not waiting and again and link.finish(again[0][0].removesuffix("-again")):
            waiting, again = again[:1], again[1:]
        while waiting and rng.random() < 0.4:
            rid, ids = waiting.pop()
            link.put(GenerateRequest(rid=rid, input_ids=frozen_tokens(ids), sampling=sampling))
        loop.round()
        counters.preempted = max(counters.preempted, int(table.stats.preemptions.sum()))
        flights = loop.state.in_flight
        counters.overlapped += len(flights)
        for flight in flights:
            counts = flight.batch.counts
            counters.mixed += bool((counts == 1).any() and (counts > 1).any())
            counters.partial_chunks += int((~flight.batch.samples).sum())
    counters.cached_tokens = max((cached for sent in link.sent for cached in sent.cached_tokens), default=0)
    return counters


def differences(wanted: list[Prompt], link: RecordingLink) -> tuple[list[str], int]:
    """Mismatches that count, and how many prompts were excused at a tiny margin."""
    found, excused = [], 0
    for prompt in wanted:
        for rid in (prompt.rid, f"{prompt.rid}-again"):
            got = link.tokens(rid)
            if not got and rid.endswith("-again"):
                continue
            for at, (token, expected) in enumerate(zip(got, prompt.expected, strict=True)):
                if token != expected:
                    if prompt.margins[at] < MARGIN:
                        excused += 1
                    else:
                        found.append(f"{rid}[{at}]: {token} for {expected}, margin {prompt.margins[at]:.2e}")
                    break
    return found, excused
