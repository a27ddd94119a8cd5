"""What the sampler does besides drawing: greedy choice, bias, bans, penalties, bad rows, log-probabilities."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from sampling_rig import picked, seated

from tokenspeed.device.sampling.base import logprobs
from tokenspeed.plane.messages import GREEDY_BELOW
from tokenspeed.plane.plan import Sampling, Seat, int32

GREEDY = Sampling()


def row(vocab: int = 50, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_rows_take_the_first_of_the_largest_logits_and_leave_the_logits_as_they_were() -> None:
    logits = torch.stack([row(seed=i) for i in range(5)])
    logits[2, [7, 30]] = 50.0
    kept = logits.clone()
    tokens = picked(seated(*[GREEDY] * 5, vocab=50), logits, position=9)
    assert tokens == [7 if i == 2 else int(logits[i].argmax()) for i in range(5)]
    mixed = seated(GREEDY, Sampling(temperature=1.0), Sampling(logit_bias=((3, 99.0),)), vocab=50)
    picked(mixed, logits[:3], position=9)
    assert torch.equal(logits, kept)


def test_a_temperature_below_the_limit_is_greedy() -> None:
    logits = torch.zeros(50)
    logits[13] = 1e-3
    assert picked(seated(Sampling(temperature=GREEDY_BELOW / 2), vocab=50), logits[None], position=1) == [13]


def test_ids_beyond_the_vocabulary_are_never_chosen_though_logits_are_wider() -> None:
    logits = torch.zeros(3, 60)
    logits[:, 50:] = 100.0
    kinds = (GREEDY, Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=5, top_p=0.9))
    sampler = seated(*kinds, vocab=50)
    for position in range(30):
        assert max(picked(sampler, logits, position=position)) < 50


def test_logit_bias_is_added_before_the_choice() -> None:
    logits = row()
    best, other = int(logits.argmax()), int(logits.argmin())
    assert picked(seated(Sampling(logit_bias=((other, 100.0),)), vocab=50), logits[None], position=1) == [other]
    second = int(logits.topk(2).indices[1])
    assert picked(seated(Sampling(logit_bias=((best, -100.0),)), vocab=50), logits[None], position=1) == [second]
    drawn = seated(Sampling(temperature=1.0, logit_bias=((other, 100.0),)), vocab=50)
    assert {picked(drawn, logits[None], position=p)[0] for p in range(20)} == {other}


def test_bias_bans_and_history_ignore_ids_that_cannot_be_chosen() -> None:
    odd = Sampling(
        logit_bias=((50, 9.0), (1 << 40, 9.0), (-1, 9.0)),
        banned_until_min=(50, -1),
        min_new_tokens=5,
        repetition_penalty=2.0,
    )
    logits = row()
    sampler = seated(odd, GREEDY, vocab=50, prompt=[60, 49999, 50], output=[51])
    assert picked(sampler, logits.expand(2, -1), position=4) == [int(logits.argmax())] * 2


def test_ends_are_banned_until_the_minimum_of_new_tokens_counted_from_the_prompt() -> None:
    logits = row()
    order = logits.argsort(descending=True).tolist()
    sampling = Sampling(min_new_tokens=3, banned_until_min=(order[0], order[1]))
    sampler = seated(sampling, vocab=50, prompt_len=10)
    assert [picked(sampler, logits[None], position=p)[0] for p in range(10, 15)] == [order[2]] * 3 + [order[0]] * 2


def test_a_ban_of_every_id_flags_the_row_and_not_its_neighbour() -> None:
    sampler = seated(Sampling(min_new_tokens=1, banned_until_min=tuple(range(50))), Sampling(temperature=1.0), vocab=50)
    result = sampler.sample(row().expand(2, -1), slots=np.arange(2), positions=np.zeros(2, dtype=np.int64))
    assert result.nan.tolist() == [True, False]
    assert result.tokens[0] == 0


def penalized(logits: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int]) -> torch.Tensor:
    """One id at a time, in float64."""
    changed = logits.double().clone()
    for token in range(len(logits)):
        if token in prompt or token in output:
            value = changed[token]
            factor = sampling.repetition_penalty
            changed[token] = value / factor if value > 0 else value * factor
        times = output.count(token)
        changed[token] -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
    return changed


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.8),
        Sampling(repetition_penalty=0.6),
        Sampling(frequency_penalty=0.7),
        Sampling(presence_penalty=1.1),
        Sampling(frequency_penalty=-0.4, presence_penalty=0.3, repetition_penalty=1.3),
    ],
)
def test_penalties_count_prompt_and_output_as_documented_and_the_sampler_counts_its_own_tokens(
    sampling: Sampling,
) -> None:
    prompt, output = [3, 4, 4, 9, 20, 31], [9, 40, 40]
    sampler = seated(sampling, vocab=50, prompt=prompt, output=output)
    steps = np.arange(25) + len(prompt) + len(output)
    for index, position in enumerate(steps.tolist()):
        logits = row(seed=index)
        chosen = picked(sampler, logits[None], position=position)[0]
        assert chosen == int(penalized(logits, sampling, prompt, output).argmax())
        output.append(chosen)


def test_a_request_seated_again_with_its_history_goes_on_as_if_it_had_stayed() -> None:
    sampling = Sampling(temperature=0.8, frequency_penalty=0.9, repetition_penalty=1.2, seed=11)
    prompt = [1, 2, 3]
    stayed = seated(sampling, vocab=50, prompt=prompt)
    tokens = [picked(stayed, row(seed=p)[None], position=p)[0] for p in range(3, 23)]
    again = seated(sampling, vocab=50, prompt=prompt, output=tokens[:9])
    assert [picked(again, row(seed=p)[None], position=p)[0] for p in range(12, 23)] == tokens[9:]


def test_a_slot_forgets_its_request_at_release_and_at_the_next_seat() -> None:
    logits = row()
    strict = Sampling(
        temperature=1.0, logit_bias=((0, 99.0),), repetition_penalty=2.0, min_new_tokens=9, banned_until_min=(1,)
    )
    sampler = seated(strict, vocab=50, prompt=[int(logits.argmax())])
    assert picked(sampler, logits[None], position=2) == [0]
    sampler.seat(Seat(slot=0, row=4, rid="next", sampling=GREEDY, prompt_len=1))
    assert picked(sampler, logits[None], position=2) == [int(logits.argmax())]
    sampler.seat(Seat(slot=0, row=5, rid="third", sampling=strict, prompt_len=1, history=int32([7])))
    sampler.release(0)
    sampler.release(0)
    assert picked(sampler, logits[None], position=2) == [int(logits.argmax())]


@pytest.mark.contract("OL-6")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, top_p=0.9), Sampling(presence_penalty=1.0)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_numbers_are_flagged_and_change_nothing_else(sampling: Sampling, bad: float) -> None:
    sampling = attrs.evolve(sampling, seed=3)
    logits = torch.stack([row(seed=i) for i in range(4)])
    wanted = picked(seated(*[sampling] * 4, vocab=50), logits, position=6)
    logits[1, 17], logits[3] = bad, torch.nan
    sampler = seated(*[sampling] * 4, vocab=50)
    result = sampler.sample(logits, slots=np.arange(4), positions=np.full(4, 6))
    assert result.nan.tolist() == [False, True, False, True]
    assert result.tokens.tolist() == [wanted[0], 0, wanted[2], 0]
    assert result.tokens.dtype == torch.int64


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = torch.stack([row(seed=i) for i in range(3)])
    tokens = torch.tensor([4, int(logits[1].argmax()), 0])
    values, ids, tops = logprobs(logits, tokens, 4)
    exact = logits.double() - logits.double().exp().sum(1, keepdim=True).log()
    torch.testing.assert_close(values.double(), exact[torch.arange(3), tokens], rtol=0, atol=1e-5)
    assert torch.equal(ids, logits.topk(4).indices)
    torch.testing.assert_close(tops.double(), exact.gather(1, ids), rtol=0, atol=1e-5)
    assert values[1] == tops[1, 0]


def test_log_probabilities_without_alternatives_and_with_more_than_there_are() -> None:
    logits = torch.stack([row(5, seed=i) for i in range(2)])
    _, ids, tops = logprobs(logits, torch.tensor([1, 2]), 0)
    assert ids.shape == tops.shape == (2, 0)
    _, ids, _ = logprobs(logits, torch.tensor([1, 2]), 99)
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3, 4]
