"""Decode batches over captured graphs: which graph is taken, what it is padded with, and what comes out."""

from __future__ import annotations

import attrs
import pytest
import torch
from graph_stand_in import KERNELS, Fixed, Replays
from paged_rows import PagedRun, paged_run

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.graphs import GraphedStep, capture_decodes
from tokenspeed.device.step import ForwardStep
from tokenspeed.device.weights.bind import LoadedModel, bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.errors import InvariantBroken

PAGES, PAGE_TOKENS, WIDTH = 64, 8, 16
CPU = torch.device("cpu")


def model() -> LoadedModel:
    weights = load_weights(attrs.evolve(open_random_checkpoint("tiny-llama", served_name="x"), seed=1))
    return bind_model(weights, num_pages=PAGES, page_tokens=PAGE_TOKENS, kernels=KERNELS)


@attrs.define(eq=False)
class Loading:
    """`LayersReady` that notes what it was asked for."""

    log: list[str]

    def wait_for(self, layer: int) -> None:
        self.log.append(f"layer {layer}")


def graphed(sizes: tuple[int, ...] = (1, 2, 4)) -> tuple[GraphedStep, Fixed, Replays, LoadedModel]:
    bound, replays = model(), Replays()
    fixed = Fixed(bound.step)
    with torch.inference_mode():
        step = capture_decodes(fixed, sizes=sizes, widths=(WIDTH,), device=CPU, capture=replays)
    fixed.ran.clear()
    return step, fixed, replays, bound


def run_of(step: ForwardStep) -> PagedRun:
    return paged_run(step, num_pages=PAGES, page_tokens=PAGE_TOKENS)


def ids(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def test_replayed_decodes_have_the_logits_of_the_step_itself_whatever_was_replayed_before() -> None:
    step, fixed, _, _ = graphed()
    graphs, plain = run_of(step), run_of(model().step)
    batches = [[graphs.sequence(ids(n)) for n in (19, 40, 7)], [plain.sequence(ids(n)) for n in (19, 40, 7)]]
    for active in ((0, 1, 2), (0, 1, 2), (1,), (0, 2), (0, 1, 2), (2,)):
        logits = []
        for run, rows in zip((graphs, plain), batches, strict=True):
            for row in rows:
                if not row.computed:
                    run.forward([(row, len(row.tokens))])
            for index in active:
                rows[index].tokens.append(17 + index)
            logits.append(run.forward([(rows[index], 1) for index in active]).clone())
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert fixed.ran[3:] == [4, 4, 1, 2, 4, 1]


def test_padding_writes_no_keys_and_values() -> None:
    step, _, _, bound = graphed()
    run = run_of(step)
    row = run.sequence(ids(9))
    run.forward([(row, 9)])
    before = bound.pool.layer_bytes(0).clone()
    row.tokens.append(3)
    others = [run.sequence(ids(1)), run.sequence(ids(1))]
    run.forward([(row, 1), *((other, 1) for other in others)])
    changed = (bound.pool.layer_bytes(0) != before).any(dim=(1, 2)).nonzero()[:, 0].tolist()
    assert changed == sorted([row.pages[1], *(other.pages[0] for other in others)])
    assert not bound.pool.layer_bytes(0)[0].any()


def test_the_smallest_graph_with_room_is_taken_and_none_for_chunks_crowds_and_long_tables() -> None:
    step, _, _, _ = graphed((2, 8))
    run = run_of(step)

    def size(*counts: int) -> int | None:
        graph = step.graph_for(run.rows([(run.sequence(ids(count)), count) for count in counts]))
        return None if graph is None else graph.size

    assert [size(1), size(1, 1), size(1, 1, 1), size(*[1] * 8)] == [2, 2, 8, 8]
    assert [size(*[1] * 9), size(2), size(1, 3)] == [None, None, None]
    long = run.sequence(ids(PAGE_TOKENS * WIDTH + 1))
    long.computed = PAGE_TOKENS * WIDTH
    assert step.graph_for(run.rows([(long, 1)])) is None


@pytest.mark.contract("RA-37")
def test_a_replay_begins_when_the_last_layer_of_a_load_is_there_and_a_chunk_runs_layer_by_layer() -> None:
    step, fixed, replays, _ = graphed()
    run = run_of(step)
    row = run.sequence(ids(5))
    chunk = Loading(replays.log)
    run.ready = chunk
    run.forward([(row, 5)])
    assert fixed.ready[-1] is chunk
    replays.log.clear()
    row.tokens.append(1)
    run.forward([(row, 1)])
    assert replays.log == [f"layer {step.num_layers - 1}", "replay"]


def test_every_size_is_run_once_before_it_is_captured_the_largest_first() -> None:
    bound, replays = model(), Replays()
    fixed = Fixed(bound.step)
    capture_decodes(fixed, sizes=(4, 1, 2, 2), widths=(WIDTH,), device=CPU, capture=replays)
    assert fixed.ran == [4, 4, 2, 2, 1, 1]
    with pytest.raises(InvariantBroken, match="decode graphs without a size"):
        capture_decodes(fixed, sizes=(), widths=(WIDTH,), device=CPU, capture=replays)
