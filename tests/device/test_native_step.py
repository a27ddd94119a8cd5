"""The native step against a plain dense model: every kind, ragged batches, page sizes, ranges of layers."""

from __future__ import annotations

import threading

import attrs
import pytest
import torch
from dense_llama import dense_logits, dense_tensors
from native_rig import KINDS, MODES, NUM_PAGES, SEED, checkpoint_of, native_model, native_run, odd_config, prompt
from paged_rows import paged_run

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.layers.rope import rope_frequencies
from tokenspeed.device.native.library import native_library
from tokenspeed.device.native.pack import unpack
from tokenspeed.device.native.ready import LayerCounter
from tokenspeed.device.native.step import NativeStep
from tokenspeed.device.step import AllReady, RaggedRows
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.errors import InvariantBroken
from tokenspeed.settings.model import WeightsMode


def dense(config: ModelConfig, tokens: list[int]) -> torch.Tensor:
    tensors = dense_tensors(config, list(tensor_shapes(config)), seed=SEED)
    return dense_logits(config, tensors, tokens, rope_frequencies(config))


def close(got: torch.Tensor, wanted: torch.Tensor, within: float) -> None:
    assert (got.double() - wanted.double()).abs().max().item() < within


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_has_the_logits_of_the_dense_model(kind: str) -> None:
    checkpoint, tokens = checkpoint_of(kind), prompt(150, seed=3)
    run = native_run(native_model(checkpoint))
    close(run.forward([(run.sequence(tokens), 150)], all_logits=True), dense(checkpoint.config, tokens), 2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_tokens", [1, 4, 8, 16, 32, 128])
def test_chunks_and_decodes_mixed_in_one_batch_agree_with_the_dense_model(kind: str, page_tokens: int) -> None:
    checkpoint = checkpoint_of(kind)
    run = native_run(native_model(checkpoint, page_tokens=page_tokens, threads=2))
    texts = [prompt(n, seed=n) for n in (19, 40, 7, 33, 16)]
    rows = [run.sequence(text) for text in texts]
    run.forward([(rows[0], 18), (rows[1], 25)])
    run.forward([(rows[4], 15)])
    work = [(rows[0], 1), (rows[1], 15), (rows[2], 7), (rows[3], 20), (rows[4], 1)]
    logits = run.forward(work)
    for index, (row, _) in enumerate(work):
        close(logits[index], dense(checkpoint.config, row.tokens[: row.computed])[-1], 2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_sizes_that_are_multiples_of_nothing_agree_with_the_dense_model(kind: str, kv_dtype: torch.dtype) -> None:
    checkpoint, tokens = checkpoint_of(kind, odd_config(kind)), prompt(140, seed=8)
    wanted = dense(checkpoint.config, tokens)
    run = native_run(native_model(checkpoint, kv_dtype=kv_dtype))
    row, got = run.sequence(tokens), []
    for count in (100, 1, 39):
        got.append(run.forward([(row, count)], all_logits=True))
    close(torch.cat(got), wanted, 2e-4 if kv_dtype == torch.float32 else 2e-3 * wanted.abs().max().item())


def rounded_logits(checkpoint: Checkpoint, mode: WeightsMode, tokens: list[int]) -> torch.Tensor:
    """The dense model over the weights that `mode` keeps."""
    config = checkpoint.config
    tensors = dense_tensors(config, list(tensor_shapes(config)), seed=SEED)
    library, weights = native_library(), native_model(checkpoint, mode).step.weights
    parts = {"o": "self_attn.o", "gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down", "v": "self_attn.v"}
    for index, layer in enumerate(weights.layers):
        for part, name in parts.items():
            linear = getattr(layer, part)
            tensors[f"model.layers.{index}.{name}_proj.weight"] = unpack(library, linear).double()
        for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            in_pairs = unpack(library, getattr(layer, part)).double()
            halves = in_pairs.view(heads, -1, 2, config.hidden_size).transpose(1, 2).reshape(in_pairs.shape)
            tensors[f"model.layers.{index}.self_attn.{part}_proj.weight"] = halves
    tensors["model.embed_tokens.weight"] = unpack(library, weights.embedding).double()
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = unpack(library, weights.head).double()
    return dense_logits(config, tensors, tokens, rope_frequencies(config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_computes_what_its_weights_stand_for(kind: str, mode: WeightsMode) -> None:
    checkpoint, tokens = checkpoint_of(kind), prompt(40, seed=3)
    run = native_run(native_model(checkpoint, mode))
    got = run.forward([(run.sequence(tokens), 40)], all_logits=True)
    wanted = rounded_logits(checkpoint, mode, tokens)
    close(got, wanted, 5e-4 * wanted.abs().max().item())


def first_rows(step: NativeStep) -> RaggedRows:
    run = paged_run(step, num_pages=NUM_PAGES, page_tokens=step.page_tokens)
    return run.rows([(run.sequence(prompt(5, seed=1)), 5), (run.sequence(prompt(9, seed=2)), 9)])


def test_layers_computed_in_ranges_have_the_bits_of_a_whole_run() -> None:
    step = native_model(checkpoint_of("tiny-qwen2"), WeightsMode.INT8G32).step
    rows = first_rows(step)
    whole = step.run(rows, layers=range(2), ready=AllReady())
    hidden = step.run(rows, layers=range(1), ready=AllReady())
    kept = hidden.clone()
    assert torch.equal(step.run(rows, layers=range(1, 2), ready=AllReady(), hidden=hidden), whole)
    assert torch.equal(hidden, kept)


@attrs.define(eq=False)
class AskedLayers:
    asked: list[int] = attrs.field(factory=list[int])

    def wait_for(self, layer: int) -> None:
        self.asked.append(layer)


@pytest.mark.contract("RA-36")
def test_readiness_that_only_python_knows_is_asked_for_every_layer() -> None:
    step = native_model(checkpoint_of("tiny-llama")).step
    rows, ready = first_rows(step), AskedLayers()
    whole = step.run(rows, layers=range(2), ready=AllReady())
    assert torch.equal(step.run(rows, layers=range(2), ready=ready), whole)
    assert ready.asked == [0, 1]


@pytest.mark.contract("RA-36")
def test_a_step_waits_inside_c_until_the_counter_reaches_its_layers() -> None:
    model = native_model(checkpoint_of("tiny-llama"))
    rows, ready, results = first_rows(model.step), LayerCounter(model.step.library), []
    whole = model.step.run(rows, layers=range(2), ready=AllReady())
    done = threading.Event()

    def compute() -> None:
        results.append(model.step.run(rows, layers=range(2), ready=ready))
        done.set()

    thread = threading.Thread(target=compute, daemon=True)  # nothing but the counter gets it out of C
    thread.start()
    assert not done.wait(0.05)
    ready.raise_to(1)
    ready.wait_for(0)
    assert not done.wait(0.05)
    ready.raise_to(2)
    assert done.wait(30)
    thread.join(30)
    assert torch.equal(results[0], whole)


def test_no_logits_are_computed_where_none_are_wanted() -> None:
    step = native_model(checkpoint_of("tiny-llama")).step
    rows = attrs.evolve(first_rows(step), logit_tokens=torch.zeros(0, dtype=torch.int64))
    assert step.run(rows, layers=range(2), ready=AllReady()).shape == (0, step.weights.config.vocab_size)


def test_a_token_may_be_wanted_more_often_than_there_are_tokens() -> None:
    step = native_model(checkpoint_of("tiny-llama")).step
    rows = first_rows(step)
    every = step.run(attrs.evolve(rows, logit_tokens=torch.arange(14)), layers=range(2), ready=AllReady())
    wanted = torch.tensor([13, 0, 5] * 9)
    again = step.run(attrs.evolve(rows, logit_tokens=wanted), layers=range(2), ready=AllReady())
    assert torch.equal(again, every[wanted])


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("token_ids", torch.full((14,), 264), "BAD_TOKEN"),
        ("token_ids", torch.full((14,), -1), "BAD_TOKEN"),
        ("positions", torch.arange(14), "BAD_ROWS"),
        ("offsets", torch.tensor([0, 6, 14]), "BAD_ROWS"),
        ("contexts", torch.tensor([5, 8]), "BAD_ROWS"),
        ("block_tables", torch.tensor([[1, 2], [3, NUM_PAGES]], dtype=torch.int32), "BAD_PAGE"),
        ("block_tables", torch.tensor([[1], [3]], dtype=torch.int32), "BAD_PAGE"),
        ("logit_tokens", torch.tensor([14]), "BAD_LOGITS"),
        ("positions", torch.zeros(14, dtype=torch.int32), "positions"),
        ("block_tables", torch.ones((2, 2), dtype=torch.int64), "block_tables"),
    ],
)
def test_a_batch_that_would_reach_outside_is_refused_with_the_reason(field: str, value: torch.Tensor, why: str) -> None:
    step = native_model(checkpoint_of("tiny-llama")).step
    rows = attrs.evolve(first_rows(step), **{field: value})
    with pytest.raises(InvariantBroken, match=why):
        step.run(rows, layers=range(2), ready=AllReady())


def test_layers_outside_the_model_are_refused() -> None:
    step = native_model(checkpoint_of("tiny-llama")).step
    rows = first_rows(step)
    for layers in (range(3), range(1, 1), range(0, 2, 2)):
        with pytest.raises(InvariantBroken):
            step.run(rows, layers=layers, ready=AllReady())
    with pytest.raises(InvariantBroken):
        step.run(rows, layers=range(1, 2), ready=AllReady())


def test_what_an_earlier_owner_left_in_a_page_never_reaches_the_next() -> None:
    model = native_model(checkpoint_of("tiny-llama"))
    tokens = prompt(21, seed=4)
    run = native_run(model)
    clean = run.forward([(run.sequence(tokens), 21)], all_logits=True)
    for page_tokens in (8, 16):
        model = native_model(checkpoint_of("tiny-llama"), page_tokens=page_tokens)
        model.pool.pages.fill_(float("nan"))
        run = native_run(model)
        assert torch.equal(run.forward([(run.sequence(tokens), 21)], all_logits=True), clean)


def test_a_row_of_nan_shows_in_its_logits_and_in_no_other_row() -> None:
    model = native_model(checkpoint_of("tiny-llama"), WeightsMode.INT8G32)
    run = native_run(model)
    rows = [run.sequence(prompt(9, seed=n)) for n in range(3)]
    run.forward([(row, 8) for row in rows])
    model.pool.pages[rows[1].pages[0]].fill_(float("nan"))
    logits = run.forward([(row, 1) for row in rows])
    assert logits.isnan().any(dim=1).tolist() == [False, True, False]
