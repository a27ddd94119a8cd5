"""Tokens taken out of the choice: grammar masks, allowed ids, bad words, and processors that change logits."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch

from tokenspeed.device.grammar_fill import Filler
from tokenspeed.device.kernels.torch_sampling import sample as torch_sample
from tokenspeed.device.sampling.base import Sampler, TokenMasks
from tokenspeed.device.sampling.device_sampler import device_sampler
from tokenspeed.device.sampling.processors import LogitsProcessor
from tokenspeed.device.sampling.registry import load_processors
from tokenspeed.device.sampling.sampler import batch_sampler
from tokenspeed.errors import SettingsError
from tokenspeed.plane.grammar import GrammarPlan, GrammarRow, MatcherState
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import Sampling, Seat, int32

VOCAB = 70
GREEDY, RANDOM = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=7)


def on_host(slots: int) -> Sampler:
    return batch_sampler(slots=slots, vocab_size=VOCAB)


def on_device(slots: int) -> Sampler:
    return device_sampler(slots=slots, vocab_size=VOCAB, kernel=torch_sample, to_device=torch.from_numpy)


@pytest.fixture(params=[on_host, on_device], ids=["host", "device"])
def make(request: pytest.FixtureRequest) -> object:
    return request.param


def seated(make: object, *sampling: Sampling, history: Sequence[int] = (), prompt_len: int = 0) -> Sampler:
    sampler: Sampler = make(len(sampling))  # type: ignore[operator]
    for slot, one in enumerate(sampling):
        known = int32(history) if one.uses_history else int32(())
        sampler.seat(Seat(slot=slot, row=slot, rid=f"r{slot}", sampling=one, prompt_len=prompt_len, history=known))
    return sampler


def rising(rows: int) -> torch.Tensor:
    """Every row likes high ids best; wider than the vocabulary, as padded logits are."""
    return torch.arange(VOCAB + 10, dtype=torch.float32).repeat(rows, 1) / 10


def mask(*rows: tuple[int, Sequence[int]]) -> TokenMasks:
    words = np.zeros((len(rows), (VOCAB + 31) // 32), dtype=np.int32)
    for at, (_, tokens) in enumerate(rows):
        for token in tokens:
            words[at].view(np.uint32)[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return TokenMasks(rows=np.array([row for row, _ in rows], dtype=np.int64), words=words)


def drawn(sampler: Sampler, logits: torch.Tensor, *, position: int, masks: TokenMasks | None = None) -> list[int]:
    slots = np.arange(len(logits))
    positions = np.full(len(logits), position, dtype=np.int64)
    result = sampler.sample(logits, slots=slots, positions=positions, masks=masks)
    return [-1 if nan else token for token, nan in zip(result.tokens.tolist(), result.nan.tolist(), strict=True)]


def test_a_mask_holds_its_own_row_and_no_other(make: object) -> None:
    sampler = seated(make, GREEDY, GREEDY, RANDOM, RANDOM)
    for position in range(20):
        tokens = drawn(sampler, rising(4), position=position, masks=mask((1, [3, 31, 32, 63]), (3, [5, 64])))
        assert tokens[0] == VOCAB - 1
        assert tokens[1] == 63
        assert tokens[3] in (5, 64)


def test_a_row_that_no_mask_holds_draws_what_it_draws_alone(make: object) -> None:
    alone = [drawn(seated(make, RANDOM), rising(1), position=position)[0] for position in range(10)]
    sampler = seated(make, RANDOM, RANDOM)
    both = [drawn(sampler, rising(2), position=position, masks=mask((1, [3]))) for position in range(10)]
    assert [tokens[0] for tokens in both] == alone
    assert {tokens[1] for tokens in both} == {3}


def test_a_mask_of_the_last_word_s_unused_bits_lets_no_padded_column_through(make: object) -> None:
    everything = mask((0, range(VOCAB)))
    everything.words[:] = -1
    assert drawn(seated(make, GREEDY), rising(1), position=0, masks=everything) == [VOCAB - 1]


def test_a_mask_without_a_token_fails_its_row_alone(make: object) -> None:
    sampler = seated(make, GREEDY, GREEDY)
    assert drawn(sampler, rising(2), position=0, masks=mask((0, []))) == [-1, VOCAB - 1]


def test_only_allowed_ids_are_drawn(make: object) -> None:
    sampler = seated(make, attrs.evolve(GREEDY, allowed_token_ids=(4, 9)), attrs.evolve(RANDOM, allowed_token_ids=(8,)))
    assert drawn(sampler, rising(2), position=3) == [9, 8]


def test_a_bad_word_is_not_completed_and_its_beginning_may_stand(make: object) -> None:
    best, second = VOCAB - 1, VOCAB - 2
    sampler = seated(make, attrs.evolve(GREEDY, bad_words=((best, best), (second, second, best))), prompt_len=2)
    tokens = [drawn(sampler, rising(1), position=position)[0] for position in range(2, 8)]
    # best; then not best again; then best once more, since "second, second" does not stand before it.
    assert tokens == [best, second, best, second, best, second]
    single = seated(make, attrs.evolve(GREEDY, bad_words=((best,),)))
    assert drawn(single, rising(1), position=0) == [second]


def test_bad_words_know_the_output_of_before_a_retraction_but_not_the_prompt(make: object) -> None:
    best, word = VOCAB - 1, ((3, VOCAB - 1),)
    after = seated(make, attrs.evolve(GREEDY, bad_words=word), history=[1, 2, 3], prompt_len=2)
    assert drawn(after, rising(1), position=3) == [best - 1]
    prompt_only = seated(make, attrs.evolve(GREEDY, bad_words=word), history=[1, 2, 3], prompt_len=3)
    assert drawn(prompt_only, rising(1), position=3) == [best]


def test_bans_give_way_where_a_grammar_would_be_left_without_a_token(make: object) -> None:
    early = attrs.evolve(GREEDY, min_new_tokens=5, banned_until_min=(6,), bad_words=((6,),))
    sampler = seated(make, early, attrs.evolve(GREEDY, min_new_tokens=5, banned_until_min=(VOCAB - 1,)))
    assert drawn(sampler, rising(2), position=0, masks=mask((0, [6]))) == [6, VOCAB - 2]
    assert drawn(sampler, rising(2), position=0, masks=mask((0, [6, 4])))[0] == 4


@attrs.define(eq=False)
class Only:
    """Lets one token through; raises when asked for the impossible."""

    token: int
    told: list[int]

    def __call__(self, logits: np.ndarray, position: int) -> None:
        del position
        keep = logits[self.token].copy()
        logits[:] = -np.inf
        logits[self.token] = keep

    def drew(self, token: int) -> None:
        self.told.append(token)


TOLD: list[int] = []


def only(*, argument: str, history: Int32Array, prompt_len: int, vocab_size: int) -> Only:
    del history, prompt_len, vocab_size
    return Only(int(argument), TOLD)


def test_a_registered_processor_works_on_its_requests_only_and_a_failing_one_ends_its_request_only() -> None:
    registered: dict[str, LogitsProcessor] = {"only": only}
    sampler = batch_sampler(slots=4, vocab_size=VOCAB, processors=registered)
    wanted = [
        GREEDY,
        attrs.evolve(GREEDY, processors=(("only", "5"),)),
        attrs.evolve(GREEDY, processors=(("only", "nonsense"),)),
        attrs.evolve(RANDOM, processors=(("only", "9999"),)),
    ]
    for slot, one in enumerate(wanted):
        sampler.seat(Seat(slot=slot, row=slot, rid=f"r{slot}", sampling=one, prompt_len=0, history=int32(())))
    assert drawn(sampler, rising(4), position=0) == [VOCAB - 1, 5, -1, -1]
    assert TOLD == [5]
    for slot in (1, 2, 3):
        sampler.release(slot)
        sampler.seat(Seat(slot=slot, row=slot, rid="new", sampling=GREEDY, prompt_len=0))
    assert drawn(sampler, rising(4), position=1) == [VOCAB - 1] * 4


def test_processors_are_loaded_by_name_and_a_wrong_name_says_what_there_is() -> None:
    assert [*load_processors(["mine=test_sampling_choice:only"])] == ["mine"]
    for wrong in ("nobody", "x=no.such.module:thing", "x=test_sampling_choice:VOCAB"):
        with pytest.raises(SettingsError, match=r"sampling\.logits_processors"):
            load_processors([wrong])
    with pytest.raises(
        SettingsError, match=r"x cannot be called with argument, .*: missing a required argument: 'slots'"
    ):
        load_processors(["x=test_sampling_choice:on_host"])


@attrs.define(eq=False)
class Counted:
    """Matchers that allow one token each and count what is asked of them."""

    words: int = (VOCAB + 31) // 32
    log: list[str] = attrs.field(factory=list)

    def fill(self, rows: Sequence[GrammarRow], words: Int32Array) -> None:
        self.log.append("fill")
        words[:] = 0
        for at, row in enumerate(rows):
            words[at, 0] = 1 << row.handle

    def bring(self, handle: int, tokens: Sequence[int]) -> None:
        self.log.append(f"bring {handle} {list(tokens)}")

    def accept(self, handles: Sequence[int], tokens: Sequence[int]) -> tuple[MatcherState, ...]:
        self.log.append("advance")
        return tuple(MatcherState.ENDED if token == 3 else MatcherState.REFUSED for token in tokens)


@pytest.mark.contract("GR-6", "GR-7")
def test_one_fill_serves_both_paths_and_advancing_tells_ends_and_faults_by_batch_index() -> None:
    matchers = Counted()
    filler = Filler(matchers)
    rows = (GrammarRow(index=1, handle=3, produced=2, known=(8, 9)), GrammarRow(index=4, handle=5, produced=0))
    sampled = np.array([0, 1, 4], dtype=np.int64)
    for eager in (True, False):
        masks = filler.fill(GrammarPlan(rows=rows, eager=eager), sampled)
        assert masks is not None
        assert masks.rows.tolist() == [1, 2]
        assert masks.words[:, 0].tolist() == [8, 32]
    assert matchers.log == ["bring 3 [8, 9]", "fill"] * 2
    plan = GrammarPlan(rows=rows)
    ends = filler.accept(plan, masks, np.array([7, 3, 6]), np.array([False, False, False]))
    assert (ends.ends, ends.faults) == ((1,), (4,))
    assert filler.fill(GrammarPlan(), sampled) is None
    nobody = filler.accept(plan, masks, np.array([7, 3, 6]), np.array([False, True, True]))
    assert (nobody.ends, nobody.faults) == ((), ())
