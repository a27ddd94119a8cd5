"""Commits of batches that come again: what is shared, what is noticed, what a round costs in objects."""

from __future__ import annotations

import copy
import gc
import random
import statistics
import sys
import tracemalloc

import attrs
import numpy as np
import pytest
from rig import hand_rig, request

from tokenspeed.control.outbox import Outbox
from tokenspeed.control.output import Output
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Finish, OneToken, OutputBatch, Refusal, frozen_tokens
from tokenspeed.plane.plan import ForwardBatch, Sampling, int32
from tokenspeed.plane.results import ForwardResult
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.plane.table import RequestTable, request_table
from tokenspeed.settings.model import SchedulerSettings, Settings
from tokenspeed.testing import RecordingLink, ScriptedPlane

VOCAB = 50


def eos(*ids: int) -> np.ndarray:
    mask = np.zeros(VOCAB, dtype=np.bool_)
    mask[list(ids)] = True
    return mask


def seated(count: int, *, slots: int = 8, max_new: int = 20, max_len: int = 64) -> RequestTable:
    table = request_table(slots=slots, max_len=max_len)
    for i in range(count):
        row = table.add(rid=f"r{i}", tokens=frozen_tokens([1, 2, 3 + i]), max_new=max_new, sampling=Sampling())
        table.seat(row, i)
    return table


def batch_of(table: RequestTable, rows: np.ndarray, samples: list[bool] | None = None) -> ForwardBatch:
    known = table.tokens.known[rows]
    return ForwardBatch(
        rows=rows,
        slots=int32(table.schedule.slot[rows]),
        starts=int32(known - 1),
        counts=int32([1] * len(rows)),
        samples=np.array(samples if samples is not None else [True] * len(rows)),
        input_ids=int32([-1] * len(rows)),
    )


def rows_of(table: RequestTable, *rids: str) -> np.ndarray:
    return int32([table.by_rid[rid] for rid in rids])


def test_messages_of_equal_batches_share_their_constant_columns_and_none_changes_later() -> None:
    table = seated(3)
    output, rows = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)), rows_of(table, "r0", "r1", "r2")
    sent: list[OutputBatch] = []
    kept = []
    for tokens in ([4, 5, 6], [7, 8, 9], [10, 0, 12]):
        output.commit(batch_of(table, rows), ForwardResult(tokens=tokens))
        message = output.take(None)
        assert message is not None
        sent.append(message)
        kept.append(copy.deepcopy(message))
    output.end((table.by_rid["r0"],), Finish.ABORT, status=503, message="gone")
    assert output.take(None) is not None
    for name in ("rids", "prompt_tokens", "cached_tokens", "status", "messages", "logprobs"):
        assert getattr(sent[0], name) is getattr(sent[1], name), name
    assert sent == kept
    assert [message.completion_tokens for message in sent] == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]
    assert sent[2].finished == [0, int(Finish.STOP), 0]


def test_two_commits_of_one_batch_in_a_round_send_the_tokens_of_both() -> None:
    table = seated(2)
    output, rows = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)), rows_of(table, "r0", "r1")
    output.commit(batch_of(table, rows), ForwardResult(tokens=[10, 20]))
    output.commit(batch_of(table, rows), ForwardResult(tokens=[11, 0]))
    message = output.take(None)
    assert message is not None
    assert (message.rids, message.output_ids) == (["r0", "r1"], [[10, 11], [20, 0]])
    assert (message.completion_tokens, message.finished) == ([2, 2], [0, int(Finish.STOP)])


def test_a_row_that_changed_its_slot_is_noticed_although_the_batch_is_the_same_array() -> None:
    table = seated(2)
    output, rows = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)), rows_of(table, "r0", "r1")
    output.commit(batch_of(table, rows), ForwardResult(tokens=[10, 20]))
    table.unseat(table.by_rid["r0"])
    table.seat(table.by_rid["r0"], 5)
    output.commit(batch_of(table, rows), ForwardResult(tokens=[11, 21]))
    assert table.tokens_of(table.by_rid["r0"]).tolist() == [1, 2, 3, 10, 11]
    assert table.tokens_of(table.by_rid["r1"]).tolist() == [1, 2, 4, 20, 21]
    table.unseat(table.by_rid["r1"])
    with pytest.raises(InvariantBroken, match="without a slot"):
        output.commit(batch_of(table, rows), ForwardResult(tokens=[12, 22]))


@pytest.mark.contract("OL-7", "OL-17")
def test_a_request_that_ended_is_passed_over_although_the_batch_is_the_same_array() -> None:
    table = seated(3)
    output, rows = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)), rows_of(table, "r0", "r1", "r2")
    batches = [batch_of(table, rows) for _ in range(3)]
    output.commit(batches[0], ForwardResult(tokens=[4, 5, 6]))
    output.end((table.by_rid["r1"],), Finish.ABORT)
    output.take(None)
    output.commit(batches[1], ForwardResult(tokens=[7, 8, 0]))
    second = output.take(None)
    output.commit(batches[2], ForwardResult(tokens=[9, 8, 7]))
    third = output.take(None)
    assert second is not None
    assert third is not None
    assert (second.rids, second.output_ids) == (["r0", "r2"], [[7], [0]])
    assert (third.rids, third.output_ids, third.completion_tokens) == (["r0"], [[9]], [3])


def test_a_token_behind_the_end_of_its_line_is_a_broken_invariant() -> None:
    table = seated(2, max_new=100, max_len=6)
    output, rows = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)), rows_of(table, "r0", "r1")
    for tokens in ([10, 20], [11, 21], [12, 22]):
        output.commit(batch_of(table, rows), ForwardResult(tokens=tokens))
    with pytest.raises(InvariantBroken, match="end of its line"):
        output.commit(batch_of(table, rows), ForwardResult(tokens=[13, 23]))
    assert table.tokens_of(table.by_rid["r1"]).tolist() == [1, 2, 4, 20, 21, 22]


def test_outputs_refusals_and_ends_of_one_round_are_all_in_its_message() -> None:
    table = seated(3)
    output, rows = Output(table=table, is_eos=eos(0), outbox=Outbox(table=table)), rows_of(table, "r0", "r1", "r2")
    batches = [batch_of(table, rows) for _ in range(3)]
    output.commit(batches[0], ForwardResult(tokens=[4, 5, 6]))
    output.refuse((Refusal(rid="late", status=429, message="full"),))
    output.end((table.by_rid["r1"],), Finish.ABORT, message="cancelled")
    output.commit(batches[1], ForwardResult(tokens=[7, 8, 9]))
    message = output.take(None)
    assert message is not None
    assert message.rids == ["r0", "r1", "r2", "late"]
    assert message.output_ids == [[4, 7], [5], [6, 9], []]
    assert message.completion_tokens == [2, 1, 2, 0]
    assert message.finished == [0, int(Finish.ABORT), 0, int(Finish.ABORT)]
    assert message.status == [0, 0, 0, 429]
    output.refuse((Refusal(rid="later", status=429, message="full"),))
    output.commit(batches[2], ForwardResult(tokens=[1, 8, 2]))
    behind = output.take(None)
    assert behind is not None
    assert (behind.rids, behind.output_ids) == (["later", "r0", "r2"], [[], [1], [2]])


@attrs.define(eq=False)
class Model:
    """One request, step by step."""

    tokens: list[int]
    prompt: int
    max_new: int
    min_new: int
    eos_ends: bool
    stops: frozenset[int]
    live: bool = True

    def step(self, token: int) -> Finish:
        self.tokens.append(token)
        made = len(self.tokens) - self.prompt
        stop = (self.eos_ends and token in (0, 1)) or token in self.stops
        if stop and made >= self.min_new:
            return Finish.STOP
        return Finish.LENGTH if made >= self.max_new else Finish.RUNNING


@pytest.mark.parametrize("seed", range(12))
def test_commits_of_batches_that_come_and_go_equal_a_model_of_each_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    table, models, order = request_table(slots=6, max_len=64), {}, []
    output = Output(table=table, is_eos=eos(0, 1), outbox=Outbox(table=table))
    free = list(range(6))

    def arrive() -> None:
        rid = f"r{len(models)}"
        prompt, stops = [5] * rng.randint(1, 4), frozenset(rng.sample(range(20, 30), rng.randint(0, 2)))
        model = Model(prompt, len(prompt), rng.randint(1, 12), rng.randint(0, 3), rng.random() < 0.7, stops)
        row = table.add(
            rid=rid,
            tokens=frozen_tokens(prompt),
            max_new=model.max_new,
            sampling=Sampling(min_new_tokens=model.min_new),
            eos_ends=model.eos_ends,
            extra_stops=stops,
        )
        table.seat(row, free.pop())
        models[rid] = model
        order.append(rid)

    rows = int32([])
    for _ in range(160):
        if free and rng.random() < 0.3:
            arrive()
            rows = rows_of(table, *order)
        if order and rng.random() < 0.1:  # retracted and back in another slot
            row = table.by_rid[rng.choice(order)]
            slot, target = int(table.schedule.slot[row]), free.pop() if free else None
            if target is not None:
                table.unseat(row)
                table.seat(row, target)
                free.append(slot)
        if not len(rows):
            continue
        samples = [rng.random() < 0.9 for _ in order] if rng.random() < 0.2 else [True] * len(order)
        tokens = [rng.choice((0, 1, 7, 9, 21, 24, 27)) for sampled in samples if sampled]
        landed = output.commit(batch_of(table, rows, samples), ForwardResult(tokens=tokens))
        told = {}
        script = iter(tokens)
        for rid, sampled in zip(order, samples, strict=True):
            if sampled and models[rid].live:
                told[rid] = models[rid].step(token := next(script)), token
            elif sampled:
                next(script)
        message = output.take(None)
        entries = () if message is None else zip(message.finished, message.output_ids, strict=True)
        got = dict(zip(() if message is None else message.rids, entries, strict=True))
        assert got == {rid: (int(finish), [token]) for rid, (finish, token) in told.items()}
        ended = [rid for rid, (finish, _) in told.items() if finish]
        assert sorted(landed.finished) == sorted(table.by_rid[rid] for rid in ended)
        for rid in order:
            assert table.tokens_of(table.by_rid[rid]).tolist() == models[rid].tokens
        for rid in ended:
            models[rid].live = False
        if rng.random() < 0.5:  # the scheduler lets ended requests go, later than the output does
            for rid in [rid for rid in order if not models[rid].live]:
                row = table.by_rid[rid]
                free.append(int(table.schedule.slot[row]))
                table.unseat(row)
                table.free(row)
                order.remove(rid)
            rows = rows_of(table, *order)
    assert len(models) > 10


@attrs.define(eq=False)
class CountingLink(RecordingLink):
    """Keeps no message; notes how many memory blocks of the interpreter are in use when one is handed over."""

    blocks: int = 0

    def send(self, batch: OutputBatch) -> None:
        self.blocks = sys.getallocatedblocks()


def cost_of_a_round(running: int) -> tuple[int, int]:
    """Of a steady decode round: blocks it has taken when its message is complete, and the most bytes it takes."""
    specs = DeviceSpecs(
        backend="none",
        model_name="toy",
        dtype="float32",
        vocab_size=VOCAB,
        max_model_len=512,
        num_pages=64 + running * 40,
        page_tokens=16,
        max_num_seqs=running,
        max_batched_tokens=16 * running,
        eos_token_ids=(0,),
    )
    sent = [7] * running
    plane = ScriptedPlane(answer=lambda batch: ForwardResult(tokens=sent[: int(batch.samples.sum())]), keep_plans=False)
    settings = Settings(scheduler=SchedulerSettings(max_num_seqs=running, max_waiting=running, chunk_tokens=256))
    rig = hand_rig(specs=specs, settings=settings, plane=plane)
    link = CountingLink()
    loop = attrs.evolve(rig.loop, frontend=link)
    link.put(*(request(f"r{i}", 16, max_new=200) for i in range(running)))
    for _ in range(24):
        loop.round()
    assert loop.scheduler.sizes().decoding == running
    blocks, peaks = [], []
    gc.collect()
    gc.disable()
    for _ in range(40):
        before = sys.getallocatedblocks()
        loop.round()
        blocks.append(link.blocks - before)
    tracemalloc.start()
    for _ in range(20):
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        loop.round()
        peaks.append(tracemalloc.get_traced_memory()[1] - start)
    tracemalloc.stop()
    gc.enable()
    return statistics.median_low(blocks), statistics.median_low(peaks)


def test_a_steady_round_makes_no_object_a_request_but_the_numbers_it_sends() -> None:
    """Tokens and lengths are small integers here, which the interpreter keeps once for all.

    What was made anew while the old was still held would show in the bytes: a tuple or list of one takes
    48 and more, the columns of a round about 25 in all.
    """
    few, many = cost_of_a_round(32), cost_of_a_round(256)
    assert abs(many[0] - few[0]) < 32
    assert (many[1] - few[1]) / (256 - 32) < 40


def test_one_new_token_each_reads_like_the_lists_it_stands_for() -> None:
    column = OneToken([5, 6, 7])
    assert column == [[5], [6], [7]]
    assert column != [[5], [6]]
    assert (column[1], column[-1], column[:2], len(column)) == ([6], [7], [[5], [6]], 3)
    assert [token for ids in column for token in ids] == [5, 6, 7]
