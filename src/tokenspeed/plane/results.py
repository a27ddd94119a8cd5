"""What comes back: results of forwards, cache acknowledgments, and the events made of them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import attrs

from tokenspeed.plane.messages import Int32Array, TopLogprobs
from tokenspeed.plane.plan import ForwardBatch


@attrs.frozen(kw_only=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens at ``first, first + 1, …`` of one batch row."""

    index: int
    first: int
    values: list[float]
    top: list[TopLogprobs]


@attrs.frozen(kw_only=True)
class ForwardResult:
    """One landed forward as plain Python values (OL-1, OL-3).

    Attributes:
        tokens: one token for each row with ``batch.samples``, in batch order.
        token_logprobs: by batch index, for the rows of `LogprobPlan.sampled`.
        token_top_logprobs: by batch index, likewise.
        prompt_logprobs: one entry for each row of `LogprobPlan.prompt`.
        nan_rows: batch indices whose logits were not numbers; their token is meaningless.
        grammar_ends: batch indices whose grammar accepts nothing more.
        grammar_faults: batch indices whose token was none of those that their grammar allowed.
        grammar_costly: batch indices whose grammar takes too long to follow.
        jit_compiles, jit_seconds: kernel compilations during this forward.
        device_s: seconds the device worked on it.
        async_steps, sync_fallback_steps: 1 where the futures executor fed it with a future of the step
            before, or could not; both 0 otherwise.
    """

    tokens: list[int]
    token_logprobs: dict[int, float] = attrs.field(factory=dict)
    token_top_logprobs: dict[int, TopLogprobs] = attrs.field(factory=dict)
    prompt_logprobs: list[PromptLogprobs] = attrs.field(factory=list)
    nan_rows: list[int] = attrs.field(factory=list)
    grammar_ends: list[int] = attrs.field(factory=list)
    grammar_faults: list[int] = attrs.field(factory=list)
    grammar_costly: list[int] = attrs.field(factory=list)
    jit_compiles: int = 0
    jit_seconds: float = 0.0
    device_s: float = 0.0
    async_steps: int = 0
    sync_fallback_steps: int = 0

    @property
    def faulty(self) -> bool:
        """Whether a row of it cannot go on."""
        return bool(self.nan_rows or self.grammar_faults or self.grammar_costly)


class ForwardLanded(NamedTuple):
    """A committed forward, for the scheduler's tail advance; a tuple, since each round makes one.

    Attributes:
        batch: the batch as planned.
        accepted: int32 ``[n]``, tokens each row's frontier moved by beyond its prompt chunk; None
            when every sampled row accepted exactly one (no speculation).
        finished: rows that ended with this result; no further result of theirs counts.
        surplus: decode rows whose request had ended before: their token was appended to nothing.
    """

    batch: ForwardBatch
    finished: tuple[int, ...] = ()
    accepted: Int32Array | None = None
    surplus: int = 0


@attrs.frozen(kw_only=True)
class TransferDone:
    """A PD transfer of `row` ended, and provably so: nobody reads or writes its pages any more.

    Attributes:
        ok: the KV went over whole. On a decode node the bootstrap token is committed by then.
        finished: that token ended the request.
    """

    row: int
    ok: bool
    finished: bool = False


SchedulerEvent: TypeAlias = ForwardLanded | TransferDone


@attrs.frozen(kw_only=True)
class CacheAcks:
    """Device cache operations that have completed, by operation id."""

    write_backs: tuple[int, ...] = ()
    load_backs: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()
    restores: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.write_backs or self.load_backs or self.snapshots or self.restores)

    def __len__(self) -> int:
        return len(self.write_backs) + len(self.load_backs) + len(self.snapshots) + len(self.restores)


NO_ACKS = CacheAcks()


@attrs.frozen(kw_only=True)
class StorageDone:
    """A storage operation ended: the executor has retired it and touches its host blocks no more.

    Attributes:
        outcomes: one for each of the operation's keys: a QUERY found it, a GET filled the host block
            with verified content, a PUT stored it.
    """

    op_id: int
    outcomes: tuple[bool, ...]


@attrs.frozen(kw_only=True)
class StorageReport:
    """What one member's storage executor saw since its last report (CT-28).

    Attributes:
        now_s: the executor's clock, seconds.
        pressure: of its queues, 0 (empty) to 1 (full).
        cancelled: operations that ended because of a CANCEL, without outcomes.
        error: why the report is invalid; all members fail then (CT-32).
    """

    now_s: float = 0.0
    pressure: float = 0.0
    completed: tuple[StorageDone, ...] = ()
    cancelled: tuple[int, ...] = ()
    error: str = ""


@attrs.frozen(kw_only=True)
class StorageTick:
    """The replica's agreement on storage for one round, or a change of forward permission (RA-13).

    Attributes:
        forward: forwards may be planned.
        storage: QUERY, GET and PUT may be planned; CANCEL always may.
        now_s: the first member's clock; the only time the scheduler knows.
        pressure: the worst of the members'.
        completed: operations that every owner has reported, by rising id.
        cancelled: likewise, those that some owner ended for a CANCEL.
    """

    forward: bool = True
    storage: bool = False
    now_s: float = 0.0
    pressure: float = 0.0
    completed: tuple[StorageDone, ...] = ()
    cancelled: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class HeadFacts:
    """All that the scheduler's head advance takes, in one call (SP-7)."""

    acks: CacheAcks = NO_ACKS
    tick: StorageTick | None = None

    def __bool__(self) -> bool:
        return bool(self.acks) or self.tick is not None


@attrs.frozen(kw_only=True)
class Rejected:
    """A submission the scheduler refused as a whole; it holds none of its requests (IS-20)."""

    message: str
    field: str = ""


@attrs.frozen(kw_only=True)
class Accepted:
    count: int


SubmitResult: TypeAlias = Accepted | Rejected


@attrs.frozen(kw_only=True)
class Sizes:
    """Request counts by state; every live request is in exactly one."""

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    suspended: int = 0
    finishing: int = 0

    @property
    def running(self) -> int:
        return self.prefilling + self.decoding

    @property
    def held(self) -> int:
        return self.waiting + self.prefilling + self.decoding + self.suspended + self.finishing


class BlockStored(NamedTuple):
    """Blocks that became findable: chained hashes of consecutive blocks, and their tokens.

    A tuple, since a round of a large batch makes one for every block that a request has filled.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_tokens: int
    group: int = 0


@attrs.frozen(kw_only=True)
class BlockRemoved:
    hashes: tuple[bytes, ...]
    group: int = 0


@attrs.frozen(kw_only=True)
class AllBlocksCleared:
    pass


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
