"""A step's inputs as the host can build them: from the plan and from ``token_ids_cpu``."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import attrs
import numpy as np

from tokenspeed.device.executors.futures.batch_state import UNKNOWN, InputBatch, SchedulerOutput
from tokenspeed.device.executors.futures.runtime import DeviceFuture
from tokenspeed.device.executors.prepare import Prepared, prepare
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import ForwardBatch
from tokenspeed.plane.table import Int64Array

InputIds: TypeAlias = Int64Array | DeviceFuture


@attrs.frozen(kw_only=True, eq=False)
class ModelInput:
    """What goes into one forward.

    Attributes:
        prepared: metadata; padded where the batch is.
        input_ids: int64 ``[T]`` on the host, or the future of the step before.
        req_ids: names of the batch's requests, in order.
        is_decode: every row continues its output by one token and samples the next.
        stale: some of the ids on the host are only on the device.
    """

    prepared: Prepared
    input_ids: InputIds
    req_ids: tuple[str, ...]
    is_decode: bool
    stale: bool

    @property
    def num_tokens(self) -> int:
        return len(self.prepared.token_ids)


class InputBuilder(Protocol):
    def prepare_model_input(self, output: SchedulerOutput) -> ModelInput:
        """Call it again after the batch state has learned more: it answers anew."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class HostInputs:
    """`InputBuilder` over the worker's batch state; ``ts-forward`` only.

    Attributes:
        buckets: sizes that decode batches are padded to, rising; () for a device that takes any size.
    """

    batch: InputBatch
    buckets: tuple[int, ...] = ()

    def prepare_model_input(self, output: SchedulerOutput) -> ModelInput:
        batch = output.batch
        prepared = prepare(batch, output.dispatch.logprobs, self.batch.slots)
        late, stale = prepared.late, False
        if len(late):
            tokens = self.batch.tokens_at(prepared.late_slots, prepared.positions[late])
            stale = bool((tokens == UNKNOWN).any())
            prepared.token_ids[late] = np.maximum(tokens, 0)
        decode = self._is_decode(batch)
        if decode:
            prepared = padded(prepared, self._bucket(len(batch.rows)))
        return ModelInput(
            prepared=prepared,
            input_ids=prepared.token_ids,
            req_ids=output.req_ids,
            is_decode=decode,
            stale=stale,
        )

    def _is_decode(self, batch: ForwardBatch) -> bool:
        if not (batch.counts == 1).all() or not batch.samples.all():
            return False
        return self.batch.all_past_their_prompts(batch)

    def _bucket(self, rows: int) -> int:
        return next((size for size in self.buckets if size >= rows), rows)


def padded(prepared: Prepared, size: int) -> Prepared:
    """Rows of one token without a request up to `size`: token 0 at position 0, in the null parent.

    Their output is never sampled.
    """
    rows = len(prepared.contexts)
    more = size - rows
    if more == 0:
        return prepared
    nothing = np.zeros(more, dtype=np.int64)
    total = int(prepared.offsets[-1])
    return attrs.evolve(
        prepared,
        token_ids=np.concatenate((prepared.token_ids, nothing)),
        positions=np.concatenate((prepared.positions, nothing)),
        offsets=np.concatenate((prepared.offsets, total + 1 + np.arange(more))),
        contexts=np.concatenate((prepared.contexts, nothing + 1)),
        tables=_with_nobody(prepared.tables, more),
        more_tables=tuple(_with_nobody(tables, more) for tables in prepared.more_tables),
    )


def _with_nobody(tables: Int32Array, more: int) -> Int32Array:
    return np.concatenate((tables, np.zeros((more, tables.shape[1]), dtype=np.int32)))


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, … up to the first that holds `most`."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)
