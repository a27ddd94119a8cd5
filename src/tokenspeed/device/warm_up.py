"""One request through the finished executor, before anybody waits for its answer."""

from __future__ import annotations

from tokenspeed.device.handle import Executor
from tokenspeed.device.kv.layout import STATE
from tokenspeed.device.step import AllReady
from tokenspeed.errors import ModelError
from tokenspeed.plane.plan import (
    FROM_DEVICE,
    BlockGrants,
    Dispatch,
    ForwardBatch,
    GroupBlocks,
    Sampling,
    Seat,
    index_array,
    int32,
)
from tokenspeed.plane.specs import DeviceSpecs

PROMPT_TOKENS = 32
ROW, SLOT = 0, 0


def warm_up(executor: Executor, specs: DeviceSpecs) -> None:
    """A short prompt and one decode step, waited for; then the slot and its blocks are clean again.

    Start-up only: it waits for the device.

    Raises: ModelError: the logits are not numbers.
    """
    prompt = max(1, min(PROMPT_TOKENS, specs.max_batched_tokens, specs.max_model_len - 1))
    blocks = _blocks(specs, min(prompt + 1, specs.max_model_len))
    grants = tuple(
        BlockGrants(
            group=group.group,
            slots=index_array([SLOT] * len(group.blocks)),
            indices=index_array(range(len(group.blocks))),
            blocks=int32(group.blocks),
        )
        for group in blocks
    )
    seat = Seat(slot=SLOT, row=ROW, rid="warm-up", sampling=Sampling(), prompt_len=prompt)
    steps = (
        (_batch(start=0, tokens=[0] * prompt), grants, Dispatch(seats=(seat,))),
        (_batch(start=prompt, tokens=[FROM_DEVICE]), (), Dispatch()),
    )
    for batch, changes, dispatch in steps:
        result = executor.forward(batch, changes, dispatch, AllReady()).result()
        if result.nan_rows:
            raise ModelError(f"{specs.model_name}: the model's output is not a number; its weights are damaged")
    executor.release((ROW,), (SLOT,))
    executor.zero_blocks(blocks)


def _blocks(specs: DeviceSpecs, tokens: int) -> tuple[GroupBlocks, ...]:
    """What `tokens` tokens take in each cache group, from the pool's first parents on."""
    parent, taken = 1, []
    for number, group in enumerate(specs.groups):
        count = 1 if group.kind == STATE else -(-tokens // group.block_tokens)
        first = parent * group.blocks_per_parent
        taken.append(GroupBlocks(group=number, blocks=tuple(range(first, first + count))))
        parent += -(-count // group.blocks_per_parent)
    return tuple(taken)


def _batch(*, start: int, tokens: list[int]) -> ForwardBatch:
    return ForwardBatch(
        rows=index_array([ROW]),
        slots=index_array([SLOT]),
        starts=int32([start]),
        counts=int32([len(tokens)]),
        samples=int32([1]).astype(bool),
        input_ids=int32(tokens),
    )
