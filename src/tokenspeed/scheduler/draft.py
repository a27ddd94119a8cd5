"""A plan in the making."""

from __future__ import annotations

from typing import NamedTuple

import attrs
import numpy as np

from tokenspeed.plane.messages import BoolArray, IndexArray, Int32Array
from tokenspeed.plane.plan import EMPTY_INDEX, EMPTY_INT32, FROM_DEVICE, ForwardBatch, PlanAbort, index_array, int32


@attrs.frozen(kw_only=True, eq=False)
class Chunk:
    """Prompt tokens (or, after a retraction, known tokens) of one row."""

    row: int
    slot: int
    start: int
    samples: bool
    ids: Int32Array


@attrs.frozen(kw_only=True, eq=False)
class Constants:
    """What every decode row has in common; read-only."""

    ones: Int32Array
    samples: BoolArray
    from_device: Int32Array

    def first(self, n: int) -> Constants:
        return Constants(ones=self.ones[:n], samples=self.samples[:n], from_device=self.from_device[:n])


def constants(size: int) -> Constants:
    samples: BoolArray = np.ones(size, dtype=np.bool_)
    samples.setflags(write=False)
    return Constants(
        ones=int32(np.ones(size)), samples=samples, from_device=int32(np.full(size, FROM_DEVICE, dtype=np.int32))
    )


class DecodeRows(NamedTuple):
    """Rows that compute one token each, all from the device; read-only, as in `ForwardBatch`."""

    rows: IndexArray
    slots: IndexArray
    starts: Int32Array
    common: Constants


NO_CONSTANTS = constants(0)
NO_DECODES = DecodeRows(EMPTY_INDEX, EMPTY_INDEX, EMPTY_INT32, NO_CONSTANTS)


@attrs.define(eq=False)
class PlanDraft:
    """Filled by the parts of the scheduler while one plan is built.

    ``pressed``: pages ran short, so nobody is admitted by this plan. ``stuck``: prompts whose next
    chunk lacked blocks.
    """

    round_id: int
    decodes: DecodeRows = attrs.field(init=False, default=NO_DECODES)
    chunks: list[Chunk] = attrs.field(init=False, factory=list)
    seated: list[int] = attrs.field(init=False, factory=list)
    preempted: list[int] = attrs.field(init=False, factory=list)
    retired: list[int] = attrs.field(init=False, factory=list)
    aborts: list[PlanAbort] = attrs.field(init=False, factory=list)
    stuck: list[int] = attrs.field(init=False, factory=list)
    pressed: bool = attrs.field(init=False, default=False)

    def batch(self) -> ForwardBatch | None:
        """Decodes first, then chunks in the order they were planned."""
        decodes, common = self.decodes, self.decodes.common
        if not self.chunks:
            if not len(decodes.rows):
                return None
            return ForwardBatch(
                decodes.rows, decodes.slots, decodes.starts, common.ones, common.samples, common.from_device
            )
        chunks = self.chunks
        sampled = np.concatenate([common.samples, np.array([chunk.samples for chunk in chunks], dtype=np.bool_)])
        sampled.setflags(write=False)
        return ForwardBatch(
            rows=index_array([*decodes.rows.tolist(), *(chunk.row for chunk in chunks)]),
            slots=index_array([*decodes.slots.tolist(), *(chunk.slot for chunk in chunks)]),
            starts=_joined(decodes.starts, [chunk.start for chunk in chunks]),
            counts=_joined(common.ones, [len(chunk.ids) for chunk in chunks]),
            samples=sampled,
            input_ids=_frozen(np.concatenate([common.from_device, *(chunk.ids for chunk in chunks)])),
        )


def _joined(head: Int32Array, tail: list[int]) -> Int32Array:
    return _frozen(np.concatenate([head, np.array(tail, dtype=np.int32)]))


def _frozen(array: Int32Array) -> Int32Array:
    array.setflags(write=False)
    return array
