"""The hybrid model: its rule, its state blocks, and greedy tokens through executor and pool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from dense_hybrid import hybrid_continuation, hybrid_logits, hybrid_tensors
from dense_llama import Tensors
from grouped_rig import GroupedRig, grouped_rig

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.layers.gated_delta import DeltaInputs, advance
from tokenspeed.device.on_stream import on_stream
from tokenspeed.plane.plan import BlockCopy, GroupBlocks

CHECKPOINT = open_random_checkpoint("tiny-hybrid", served_name="tiny")
CONFIG = CHECKPOINT.config
STATE_GROUP = 1


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return hybrid_tensors(CHECKPOINT)


@pytest.fixture(params=["streams", "futures"])
def rig(request: pytest.FixtureRequest) -> Iterator[GroupedRig]:
    with grouped_rig(CHECKPOINT, executor=request.param) as made:
        yield made


def prompt(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def inputs(tokens: int, seed: int = 0) -> DeltaInputs:
    draw = torch.Generator().manual_seed(seed)
    key = torch.randn(tokens, 3, 8, generator=draw)
    return DeltaInputs(
        query=torch.randn(tokens, 3, 8, generator=draw),
        key=key / key.norm(dim=2, keepdim=True),
        value=torch.randn(tokens, 3, 5, generator=draw),
        decay=torch.rand(tokens, 3, generator=draw),
        write=torch.rand(tokens, 3, generator=draw),
    )


def part(whole: DeltaInputs, first: int, last: int) -> DeltaInputs:
    return DeltaInputs(
        query=whole.query[first:last],
        key=whole.key[first:last],
        value=whole.value[first:last],
        decay=whole.decay[first:last],
        write=whole.write[first:last],
    )


def test_a_written_key_gives_its_value_back_and_decay_makes_it_fade() -> None:
    key, value = torch.zeros(2, 1, 4), torch.zeros(2, 1, 3)
    key[:, 0, 1] = 1.0
    value[0, 0] = torch.tensor([1.0, 2.0, 3.0])
    state, decay, write = torch.zeros(1, 1, 4, 3), torch.tensor([[1.0], [0.5]]), torch.tensor([[1.0], [0.0]])
    out = advance(state, DeltaInputs(query=key, key=key, value=value, decay=decay, write=write), [0, 2])
    assert out[:, 0].tolist() == [[1.0, 2.0, 3.0], [0.5, 1.0, 1.5]]
    assert state[0, 0, 1].tolist() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("cuts", [(0, 1, 2, 23), (0, 7, 23), (0, 22, 23), tuple(range(24))])
def test_where_a_sequence_was_cut_does_not_change_a_bit(cuts: tuple[int, ...]) -> None:
    whole, start = inputs(23), torch.randn(1, 3, 8, 5, generator=torch.Generator().manual_seed(5))
    expected_state, state = start.clone(), start.clone()
    expected = advance(expected_state, whole, [0, 23])
    found = [advance(state, part(whole, first, last), [0, last - first]) for first, last in pairwise(cuts)]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(state, expected_state)


def test_other_rows_do_not_change_a_bit() -> None:
    whole, offsets = inputs(20), [0, 1, 8, 9, 20]
    states = torch.randn(4, 3, 8, 5, generator=torch.Generator().manual_seed(6))
    alone = [states[row : row + 1].clone() for row in range(4)]
    together = advance(states, whole, offsets)
    for row, (first, last) in enumerate(pairwise(offsets)):
        assert torch.equal(advance(alone[row], part(whole, first, last), [0, last - first]), together[first:last])
        assert torch.equal(alone[row][0], states[row])


def test_the_reference_needs_what_lies_far_back(tensors: Tensors) -> None:
    ids = prompt(60, seed=1)
    far = [(ids[0] + 1) % 256, *ids[1:]]
    assert not torch.allclose(
        hybrid_logits(CONFIG, tensors, ids)[-1], hybrid_logits(CONFIG, tensors, far)[-1], atol=1e-3
    )
    assert len(set(hybrid_continuation(CONFIG, tensors, ids, 12))) > 3


def test_a_whole_prompt_and_its_decode_equal_the_reference(rig: GroupedRig, tensors: Tensors) -> None:
    ids = prompt(37, seed=2)
    resident = rig.new(ids)
    rig.step((resident, 37))
    rig.decode(resident, count=15)
    assert resident.out == hybrid_continuation(CONFIG, tensors, ids, 16)


@pytest.mark.parametrize("chunks", [(1, 36), (16, 16, 5), (20, 17), (5, 1, 30, 1)])
def test_a_prompt_in_chunks_equals_the_reference(rig: GroupedRig, tensors: Tensors, chunks: tuple[int, ...]) -> None:
    ids = prompt(37, seed=2)
    resident = rig.new(ids)
    for chunk in chunks:
        rig.step((resident, chunk))
    rig.decode(resident, count=5)
    assert resident.out == hybrid_continuation(CONFIG, tensors, ids, 6)


def test_chunks_and_decodes_in_one_batch_equal_the_reference(rig: GroupedRig, tensors: Tensors) -> None:
    prompts = [prompt(count, seed=count) for count in (40, 3, 25, 33)]
    first, second, third, fourth = (rig.new(ids) for ids in prompts)
    rig.step((first, 40), (second, 2))
    rig.step((second, 1), (first, 1), (third, 10))
    rig.step((first, 1), (third, 15), (second, 1), (fourth, 33))
    rig.decode(fourth, second, first, third, count=6)
    for resident, ids in zip((first, second, third, fourth), prompts, strict=True):
        assert resident.out == hybrid_continuation(CONFIG, tensors, ids, len(resident.out))


def test_rows_without_a_request_that_pad_a_batch_touch_no_request(tensors: Tensors) -> None:
    prompts = [prompt(count, seed=count) for count in (18, 5, 31)]
    with grouped_rig(CHECKPOINT, executor="futures", buckets=(4, 8)) as rig:
        residents = [rig.new(ids) for ids in prompts]
        rig.step(*((resident, len(ids)) for resident, ids in zip(residents, prompts, strict=True)))
        rig.decode(*residents, count=6)
        rig.decode(residents[1], count=3)
    for resident, ids in zip(residents, prompts, strict=True):
        assert resident.out == hybrid_continuation(CONFIG, tensors, ids, len(resident.out))


@pytest.mark.contract("SP-36")
def test_a_request_resumed_from_a_copied_state_equals_the_reference(rig: GroupedRig, tensors: Tensors) -> None:
    shared = prompt(48, seed=7)
    donor = rig.new([*shared, *prompt(9, seed=8)])
    rig.step((donor, 48))
    # The state behind the shared tokens is kept before the next forward writes over it.
    kept = rig.block(STATE_GROUP)
    rig.copy(BlockCopy(group=STATE_GROUP, source=donor.blocks[STATE_GROUP][0], destination=kept))
    rig.step((donor, 9))
    rig.decode(donor, count=4)
    heirs = []
    for seed in (9, 10):
        heir = rig.sit([*shared, *prompt(6, seed=seed)])
        heir.computed = 48
        for index, block in enumerate(donor.blocks[0][:3]):
            rig.give(heir, 0, index, block)
        rig.give(heir, STATE_GROUP, 0, own := rig.block(STATE_GROUP))
        rig.copy(BlockCopy(group=STATE_GROUP, source=kept, destination=own))
        heirs.append(heir)
    rig.step((heirs[0], 6), (donor, 1), (heirs[1], 3))
    rig.step((heirs[1], 3))
    rig.decode(donor, *heirs, count=5)
    for resident in (donor, *heirs):
        ids = resident.tokens[: len(resident.tokens) - len(resident.out)]
        assert resident.out == hybrid_continuation(CONFIG, tensors, ids, len(resident.out))


@pytest.mark.contract("SP-39")
def test_a_state_block_that_was_not_cleaned_is_seen_in_the_tokens(rig: GroupedRig, tensors: Tensors) -> None:
    ids = prompt(20, seed=11)
    first = rig.new(ids)
    rig.step((first, 20))
    rig.decode(first, count=3)
    block = first.blocks[STATE_GROUP][0]
    for cleaned in (False, True):
        heir = rig.sit(ids)
        rig.give(heir, STATE_GROUP, 0, block)
        if cleaned:
            rig.executor.zero_blocks((GroupBlocks(group=STATE_GROUP, blocks=(block,)),))
        rig.step((heir, 20))
        rig.decode(heir, count=3)
        assert (heir.out == hybrid_continuation(CONFIG, tensors, ids, 4)) is cleaned


def test_a_forward_leaves_the_null_parent_alone(rig: GroupedRig) -> None:
    resident = rig.new(prompt(20, seed=12))
    rig.step((resident, 20))
    rig.decode(resident, count=2)
    parent = on_stream(rig.backend.exec_stream, lambda: rig.pool.bytes[: rig.layout.parent_bytes].any().item(), "read")
    assert not parent
