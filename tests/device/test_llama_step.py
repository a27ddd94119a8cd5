"""The Llama step against a plain dense model: every kind, ragged batches, page sizes, chunks."""

from __future__ import annotations

import attrs
import pytest
import torch
from dense_llama import dense_logits, dense_tensors
from paged_rows import PagedRun, paged_run

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.random_models import RANDOM_MODELS, open_random_checkpoint
from tokenspeed.device.layers.rope import rope_frequencies
from tokenspeed.device.step import AllReady
from tokenspeed.device.weights.bind import LoadedModel, bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.errors import InvariantBroken, ModelError

KINDS = ("tiny-llama", "tiny-llama3", "tiny-qwen2", "tiny-qwen3")
NUM_PAGES = 64
SEED = 1


def bound(kind: str, *, page_tokens: int = 8, num_pages: int = NUM_PAGES) -> LoadedModel:
    checkpoint = attrs.evolve(open_random_checkpoint(kind, served_name=kind), seed=SEED)
    return bind_model(load_weights(checkpoint), num_pages=num_pages, page_tokens=page_tokens)


def runs(kind: str, *, page_tokens: int = 8) -> tuple[PagedRun, ModelConfig]:
    model = bound(kind, page_tokens=page_tokens)
    return paged_run(model.step, num_pages=NUM_PAGES, page_tokens=page_tokens), model.config


def prompt(length: int, *, seed: int, vocab: int = 256) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def dense(config: ModelConfig, tokens: list[int]) -> torch.Tensor:
    tensors = dense_tensors(config, list(tensor_shapes(config)), seed=SEED)
    return dense_logits(config, tensors, tokens, rope_frequencies(config))


def close(got: torch.Tensor, wanted: torch.Tensor, within: float) -> None:
    assert (got.double() - wanted.double()).abs().max().item() < within


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_of_a_prompt_has_the_logits_of_the_dense_model(kind: str) -> None:
    run, config = runs(kind)
    tokens = prompt(21, seed=3)
    close(run.forward([(run.sequence(tokens), 21)], all_logits=True), dense(config, tokens), 2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
def test_prefill_chunks_and_decodes_mixed_in_one_batch_agree_with_the_dense_model(kind: str, page_tokens: int) -> None:
    run, config = runs(kind, page_tokens=page_tokens)
    texts = [prompt(n, seed=n) for n in (19, 40, 7, 33, 16)]
    rows = [run.sequence(text) for text in texts]
    run.forward([(rows[0], 18), (rows[1], 25)])
    run.forward([(rows[4], 15)])
    # A decode, a later chunk, a whole first chunk, a part of one, and a decode that fills a page; in this order.
    work = [(rows[0], 1), (rows[1], 15), (rows[2], 7), (rows[3], 20), (rows[4], 1)]
    logits = run.forward(work)
    for index, (row, _) in enumerate(work):
        close(logits[index], dense(config, row.tokens[: row.computed])[-1], 2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_many_rows_of_very_different_lengths_agrees_with_the_dense_model(kind: str) -> None:
    run, config = runs(kind)
    texts = [prompt(n, seed=n) for n in (150, 2, 9, 41, 17, 5)]
    rows = [run.sequence(text) for text in texts]
    for row in rows:
        run.forward([(row, len(row.tokens))])
    for token in (5, 200, 31):
        for row in rows:
            row.tokens.append(token)
        logits = run.forward([(row, 1) for row in rows])
    for index, row in enumerate(rows):
        close(logits[index], dense(config, row.tokens)[-1], 2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [(45,), (1,) * 45, (16, 16, 13), (7, 1, 30, 7), (44, 1)])
def test_a_result_does_not_depend_on_how_the_prompt_was_cut(kind: str, chunks: tuple[int, ...]) -> None:
    run, _ = runs(kind)
    tokens = prompt(45, seed=11)
    whole = run.forward([(run.sequence(tokens), 45)])[0]
    row = run.sequence(tokens)
    for count in chunks:
        logits = run.forward([(row, count)])
    close(logits[0], whole, 1e-5 * whole.abs().max().item())


def test_a_result_does_not_depend_on_the_other_rows() -> None:
    run, _ = runs("tiny-llama")
    tokens = prompt(30, seed=4)
    alone = run.sequence(tokens)
    run.forward([(alone, 29)])
    wanted = run.forward([(alone, 1)])[0]
    row, others = run.sequence(tokens), [run.sequence(prompt(20 + i, seed=i)) for i in range(6)]
    run.forward([(row, 29), *((other, 19) for other in others)])
    got = run.forward([*((other, 1) for other in others), (row, 1)])[-1]
    close(got, wanted, 1e-5 * wanted.abs().max().item())


def test_layers_can_be_run_range_by_range() -> None:
    model = bound("tiny-llama3")
    run = paged_run(model.step, num_pages=NUM_PAGES, page_tokens=8)
    tokens = prompt(13, seed=2)
    whole = run.forward([(run.sequence(tokens), 13)])
    rows = run.rows([(run.sequence(tokens), 13)])
    hidden = model.step.run(rows, layers=range(1), ready=AllReady())
    assert hidden.shape == (13, model.config.hidden_size)
    kept = hidden.clone()
    close(model.step.run(rows, layers=range(1, 2), ready=AllReady(), hidden=hidden), whole, 1e-6)
    assert torch.equal(hidden, kept), "the hidden state belongs to the caller"


def test_impossible_ranges_of_layers_are_a_bug_of_the_caller() -> None:
    model = bound("tiny-llama")
    run = paged_run(model.step, num_pages=NUM_PAGES, page_tokens=8)
    rows = run.rows([(run.sequence([1, 2]), 2)])
    hidden = torch.zeros(2, model.config.hidden_size)
    for layers, state in ((range(3), None), (range(1, 1), None), (range(0, 2, 2), None), (range(1, 2), None)):
        with pytest.raises(InvariantBroken):
            model.step.run(rows, layers=layers, ready=AllReady(), hidden=state)
    with pytest.raises(InvariantBroken):
        model.step.run(rows, layers=range(2), ready=AllReady(), hidden=hidden)


@attrs.define(eq=False)
class Recording:
    """Fills a layer's pages only when it is asked for that layer: what a load does."""

    source: torch.Tensor
    target: torch.Tensor
    waited: list[int]

    def wait_for(self, layer: int) -> None:
        self.waited.append(layer)
        self.target[1:, layer] = self.source[1:, layer]


@pytest.mark.contract("RA-36")
def test_the_step_waits_for_a_layer_before_it_reads_its_keys_and_values() -> None:
    first, second = bound("tiny-llama"), bound("tiny-llama")
    tokens = prompt(20, seed=8)
    run = paged_run(first.step, num_pages=NUM_PAGES, page_tokens=8)
    row = run.sequence(tokens)
    run.forward([(row, 16)])
    stored = first.pool.pages.clone()
    rows = run.rows([(row, 4)])
    wanted = first.step.run(rows, layers=range(2), ready=AllReady())
    loading = Recording(source=stored, target=second.pool.pages, waited=[])
    got = second.step.run(rows, layers=range(2), ready=loading)
    assert loading.waited == [0, 1]
    close(got, wanted, 1e-6)


def test_no_logits_wanted_gives_none() -> None:
    model = bound("tiny-llama")
    run = paged_run(model.step, num_pages=NUM_PAGES, page_tokens=8)
    rows = attrs.evolve(run.rows([(run.sequence([1, 2, 3]), 3)]), logit_tokens=torch.zeros(0, dtype=torch.int64))
    assert model.step.run(rows, layers=range(2), ready=AllReady()).shape == (0, model.config.vocab_size)


def test_what_an_earlier_owner_left_in_a_page_does_not_reach_the_next() -> None:
    model = bound("tiny-llama")
    run = paged_run(model.step, num_pages=NUM_PAGES, page_tokens=8)
    clean = paged_run(bound("tiny-llama").step, num_pages=NUM_PAGES, page_tokens=8)
    model.pool.pages[1:] = torch.nan
    texts = [prompt(n, seed=n) for n in (11, 3, 24)]
    dirty_rows, clean_rows = ([r.sequence(t) for t in texts] for r in (run, clean))
    for counts in ((9, 3, 20), (1, 0, 3), (1, 0, 1)):
        work = [[(row, n) for row, n in zip(rows, counts, strict=True) if n] for rows in (dirty_rows, clean_rows)]
        got, wanted = run.forward(work[0]), clean.forward(work[1])
        assert torch.isfinite(got).all()
        close(got, wanted, 1e-5 * wanted.abs().max().item())
    for _ in range(12):
        for row in (*dirty_rows, *clean_rows):
            row.tokens.append(7)
        got, wanted = (r.forward([(row, 1) for row in rows]) for r, rows in ((run, dirty_rows), (clean, clean_rows)))
        close(got, wanted, 1e-5 * wanted.abs().max().item())


def test_a_row_that_computes_no_numbers_leaves_the_others_alone() -> None:
    model = bound("tiny-llama")
    run = paged_run(model.step, num_pages=NUM_PAGES, page_tokens=8)
    good, bad = run.sequence(prompt(12, seed=1)), run.sequence(prompt(12, seed=2))
    run.forward([(good, 11), (bad, 11)])
    model.pool.pages[torch.tensor(bad.pages)] = torch.nan
    logits = run.forward([(bad, 1), (good, 1)])
    assert torch.isnan(logits[0]).all()
    close(logits[1], dense(model.config, good.tokens)[-1], 2e-4)


def test_greedy_text_of_a_random_model_is_not_one_token_for_ever() -> None:
    for kind in KINDS:
        run, _ = runs(kind)
        row = run.sequence(prompt(9, seed=5))
        logits = run.forward([(row, 9)])
        for _ in range(24):
            row.tokens.append(int(logits[0].argmax()))
            logits = run.forward([(row, 1)])
        assert len(set(row.tokens[9:])) > 4, kind


def test_an_option_the_model_does_not_compute_is_refused() -> None:
    checkpoint = open_random_checkpoint("tiny-llama", served_name="x")
    for change, named in (
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"num_kv_heads": 3}, "num_heads 4"),
    ):
        with pytest.raises(ModelError, match=named):
            load_weights(attrs.evolve(checkpoint, config=attrs.evolve(checkpoint.config, **change)))


def test_the_presets_cover_what_the_kinds_differ_in() -> None:
    configs = [RANDOM_MODELS[kind] for kind in KINDS]
    assert {c.attention_bias for c in configs} == {c.qk_norm for c in configs} == {True, False}
    assert {c.tie_embeddings for c in configs} == {True, False}
    assert any(c.head_dim * c.num_heads != c.hidden_size for c in configs)
