"""What one round asks of the executors: the plan (from the scheduler) and the dispatch (gathered).

Both are frozen; what every round makes is a tuple, at a third of a frozen class's cost. Arrays in them are
int32, int64 (indices) or bool, read-only, and never written after they were made, so that queueing them
hands them over (DP-49, DP-50).
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

import attrs
import numpy as np

from tokenspeed.plane.grammar import NO_GRAMMARS, GrammarPlan, GrammarSource
from tokenspeed.plane.messages import BoolArray, IndexArray, Int32Array

FROM_DEVICE = -1
"""In `ForwardBatch.input_ids`: the token that the slot's latest forward sampled, still on the device."""


def _readonly(array: Int32Array) -> Int32Array:
    array.setflags(write=False)
    return array


def int32(values: object) -> Int32Array:
    """A read-only int32 array from any sequence of integers."""
    return _readonly(np.array(values, dtype=np.int32))


def index_array(values: object) -> IndexArray:
    """A read-only int64 array from any sequence of integers."""
    array: IndexArray = np.array(values, dtype=np.int64)
    array.setflags(write=False)
    return array


EMPTY_INT32: Int32Array = int32(())
EMPTY_INDEX: IndexArray = index_array(())


class ForwardBatch(NamedTuple):
    """Model work of one forward: `n` rows, decode and prefill chunks mixed in any order.

    Attributes:
        rows: int64 ``[n]``, rows of the request table. The same array object comes again only while it
            names the same requests: readers may keep what they gathered by it.
        slots: int64 ``[n]``, device residences.
        starts: int32 ``[n]``, position of the first token computed (equals the KV already there).
        counts: int32 ``[n]``, tokens computed.
        samples: bool ``[n]``; the logits of the row's last token are sampled. False for all chunks
            of a prompt but the last.
        input_ids: int32 ``[sum(counts)]``; :data:`FROM_DEVICE` where the token is not on the host yet.
    """

    rows: IndexArray
    slots: IndexArray
    starts: Int32Array
    counts: Int32Array
    samples: BoolArray
    input_ids: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@attrs.frozen(kw_only=True, eq=False)
class BlockGrants:
    """Blocks that changed hands: ``table[slots[i], indices[i]] = blocks[i]``, applied before the batch.

    ``blocks`` is int32, the others are int64 ``[m]``. The device keeps the block tables by slot; a plan
    sends changes only.
    """

    group: int = 0
    slots: IndexArray = EMPTY_INDEX
    indices: IndexArray = EMPTY_INDEX
    blocks: Int32Array = EMPTY_INT32


@attrs.frozen(kw_only=True)
class GroupBlocks:
    """Blocks of one cache group, in the order of the positions they hold."""

    group: int = 0
    blocks: tuple[int, ...]


@attrs.frozen(kw_only=True)
class BlockCopy:
    """``destination = source``, both device blocks of `group`."""

    group: int = 0
    source: int
    destination: int


@attrs.frozen(kw_only=True)
class WriteBackOp:
    """Device blocks to the host tier (L2).

    Attributes:
        stream_ordered: the plan reuses the sources, so all that follows in it waits for this copy
            (RA-27). False: the sources stay pinned until the acknowledgment (RA-30).
    """

    op_id: int
    group: int
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    stream_ordered: bool = False


@attrs.frozen(kw_only=True)
class LoadBackOp:
    """Host-tier blocks to the device."""

    op_id: int
    group: int
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]


@attrs.frozen(kw_only=True)
class SnapshotOp:
    """The tail of a retraction victim to the snapshot pool; stream-ordered always.

    Attributes:
        slot: whose slot state is exported; the victim's, although this plan has freed it (SP-45).
        tail: blocks without a complete hash, at most `CacheGroupSpec.image_blocks` of each group.
        image: where in the snapshot pool.
    """

    op_id: int
    slot: int
    tail: tuple[GroupBlocks, ...]
    image: int


@attrs.frozen(kw_only=True)
class HostPages:
    """Host-tier blocks and the device blocks they are copied to, one to one."""

    group: int = 0
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]


@attrs.frozen(kw_only=True)
class RestoreOp:
    """A victim's image back to the device: pages from the host tier, tail and slot state from the snapshot pool.

    Attributes:
        slot: the resumed request's new one.
        tail: destinations, in the order of the `SnapshotOp`.
    """

    op_id: int
    slot: int
    pages: tuple[HostPages, ...]
    tail: tuple[GroupBlocks, ...]
    image: int


@attrs.frozen(kw_only=True)
class SnapshotBatch:
    """All victims that one plan images; the adapter splits it, since each is acknowledged alone (CT-4)."""

    ops: tuple[SnapshotOp, ...]


@attrs.frozen(kw_only=True)
class RestoreBatch:
    """All requests that one plan brings back."""

    ops: tuple[RestoreOp, ...]


class StorageVerb(enum.Enum):
    QUERY = "query"
    GET = "get"
    PUT = "put"
    CANCEL = "cancel"


@attrs.frozen(kw_only=True)
class StorageOp:
    """One storage (L3) transaction step; executed by the host-only storage executor.

    Attributes:
        op_id: rises by one an operation; of a CANCEL, the operation to be given up.
        keys: cache group and name of the blocks.
        host_blocks: of a GET the destinations, of a PUT the sources, one a key; theirs until the
            executor has reported the end of the operation.
    """

    op_id: int
    verb: StorageVerb
    keys: tuple[bytes, ...]
    host_blocks: tuple[int, ...] = ()


DeviceCacheOp: TypeAlias = WriteBackOp | LoadBackOp | SnapshotOp | RestoreOp
CacheOp: TypeAlias = WriteBackOp | LoadBackOp | SnapshotBatch | RestoreBatch | StorageOp


@attrs.frozen(kw_only=True)
class RemoteStream:
    """One request's KV on its way to or from another node.

    Attributes:
        pages: of a remote prefill the landing blocks, of a remote decode those to be sent: of a window
            group, what the query behind the prompt sees. Both end with the prompt.
        start: of a remote prefill, tokens that are there already; `pages` hold what comes behind them.
    """

    row: int
    rid: str
    slot: int
    pages: tuple[GroupBlocks, ...]
    room: int = 0
    start: int = 0


@attrs.frozen(kw_only=True)
class PlanAbort:
    """A request that the plan build ended by itself; its pages are already free."""

    row: int
    reason: str


class ExecutionPlan(NamedTuple):
    """One round's plan, its streams kept apart by executor (SP-24).

    Attributes:
        batch: model work, or None.
        seated: rows that got a slot in this plan; their sampling state must reach the device with it.
        grants: block-table changes that `batch` relies on, one entry a cache group that changed.
        pages_to_copy: copies inside the device, as if all sources were read first; no acknowledgment.
        pages_to_zero: blocks whose new owner needs them clean.
        retired: rows the scheduler no longer holds; the loop frees them.
        preempted: rows retracted by this plan: sent back to the waiting queue, or suspended with an image.
    """

    round_id: int
    batch: ForwardBatch | None = None
    seated: tuple[int, ...] = ()
    grants: tuple[BlockGrants, ...] = ()
    remote_prefill: tuple[RemoteStream, ...] = ()
    remote_decode: tuple[RemoteStream, ...] = ()
    cache: tuple[CacheOp, ...] = ()
    pages_to_copy: tuple[BlockCopy, ...] = ()
    pages_to_zero: tuple[GroupBlocks, ...] = ()
    aborts: tuple[PlanAbort, ...] = ()
    retired: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()

    def device_ops(self) -> tuple[DeviceCacheOp, ...]:
        """One by one, batches split, in the plan's order: each is acknowledged once (CT-12)."""
        if not self.cache:
            return ()
        ops: list[DeviceCacheOp] = []
        for op in self.cache:
            if isinstance(op, SnapshotBatch | RestoreBatch):
                ops.extend(op.ops)
            elif not isinstance(op, StorageOp):
                ops.append(op)
        return tuple(ops)

    def storage_ops(self) -> tuple[StorageOp, ...]:
        return tuple(op for op in self.cache if isinstance(op, StorageOp)) if self.cache else ()

    def needs_device(self) -> bool:
        """False exactly when nothing in the plan is for the device (SP-25)."""
        return bool(
            self.batch is not None
            or self.remote_prefill
            or self.remote_decode
            or self.pages_to_copy
            or self.pages_to_zero
            or any(not isinstance(op, StorageOp) for op in self.cache)
        )


@attrs.frozen(kw_only=True)
class Sampling:
    """Resolved sampling of one request: no None left, ready for the device.

    Attributes:
        top_k: 0 means all.
        banned_until_min: ids masked while fewer than `min_new_tokens` were generated.
        seed: 64-bit; a draw depends on (seed, position) only, never on the batch.
        bad_words, allowed_token_ids, processors: as in `SamplingParams`.
        grammar: what holds the output; for the control side, the device is given handles.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_new_tokens: int = 0
    banned_until_min: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    processors: tuple[tuple[str, str], ...] = ()
    grammar: GrammarSource | None = None

    @property
    def uses_history(self) -> bool:
        """Whether the sampler must know the request's earlier tokens."""
        return bool(self.uses_penalties or self.bad_words or self.processors)

    @property
    def uses_penalties(self) -> bool:
        """Whether the sampler must count them."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


@attrs.frozen(kw_only=True, eq=False)
class Seat:
    """A request takes a device slot: what the device must know of it before its first forward.

    Attributes:
        prompt_len: tokens of the client's prompt (penalties and `min_new_tokens` count from there).
        history: int32, all tokens known at seating (prompt, and output after a retraction) if the
            sampling uses history, else empty.
    """

    slot: int
    row: int
    rid: str
    sampling: Sampling
    prompt_len: int
    history: Int32Array = EMPTY_INT32


@attrs.frozen(kw_only=True)
class LogprobPlan:
    """Which rows of the batch return log-probabilities (OL-4); indices into the batch's rows.

    Attributes:
        sampled: (batch index, alternatives) for the row's sampled token.
        prompt: (batch index, first position, alternatives): log-probabilities of the prompt tokens
            at positions ``first..`` that this chunk's logits predict.
        prompt_targets: for each entry of `prompt`, those prompt tokens. The last one is the first
            token of the next chunk, which the batch itself does not carry.
    """

    sampled: tuple[tuple[int, int], ...] = ()
    prompt: tuple[tuple[int, int, int], ...] = ()
    prompt_targets: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sampled or self.prompt)


@attrs.frozen(kw_only=True, eq=False)
class HistorySeed:
    """Committed tokens for a new owner of a history row (HS-10): those from `first` up to `prefix_length`."""

    slot: int
    prefix_length: int
    first: int
    tokens: Int32Array


@attrs.frozen(kw_only=True, eq=False)
class Dispatch:
    """Per-round inputs of a batch, gathered on the control thread (RA-20)."""

    seats: tuple[Seat, ...] = ()
    logprobs: LogprobPlan = attrs.field(factory=LogprobPlan)
    histories: tuple[HistorySeed, ...] = ()
    grammars: GrammarPlan = NO_GRAMMARS
    ngram_windows: tuple[HistorySeed, ...] = ()
