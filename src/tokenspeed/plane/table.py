"""The request table: per-request data of one rank as rows of arrays.

One table serves planner, output, sampling and stats, because each keeping a dict by rid would cost
a Python object a request a round. It is the registered exception to "one owner per state": columns
come in groups, and **each group has exactly one writer**, named in the group's docstring. Everybody
may read. Control thread only.

A request's ``row`` is stable from submission to end. Its ``slot`` (device residence) comes and goes
with retraction. Arrays grow by doubling: never keep a reference to a column over a round, read it
through the table.

Token lists live in one of two places: a waiting request owns a compact array of its tokens, a seated
one owns a line of ``tokens.seated`` so that one indexed assignment appends for a whole batch.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import BoolArray, Int32Array
from tokenspeed.plane.plan import EMPTY_INT32, Sampling

UInt8Array: TypeAlias = npt.NDArray[np.uint8]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]

NO_SLOT = -1
NO_EXTRA_STOPS: frozenset[int] = frozenset()


@attrs.frozen(kw_only=True)
class MediaItem:
    """An image or the like: `tokens` placeholder positions from `first` on; `digest` tells it from others."""

    first: int
    tokens: int
    digest: bytes


NO_MEDIA: tuple[MediaItem, ...] = ()


def _i32(n: int) -> Int32Array:
    return np.zeros(n, dtype=np.int32)


@attrs.define(eq=False)
class IdentityColumns:
    """What a request is; fixed at admission. Writer: ingress.

    ``order`` is the admission number (unique, rising). ``logprobs`` is -1 or the number of
    alternatives for each sampled token; ``prompt_from`` is -1 or the first prompt position that
    wants log-probabilities. ``eos_ends``: the model's EOS ids end the request; ``extra_stops``: ids
    beyond those. ``media``: what else than text the prompt holds, by position.
    """

    rid: list[str]
    prompt_len: Int32Array
    max_new: Int32Array
    min_new: Int32Array
    order: Int64Array
    priority: Int32Array
    logprobs: Int32Array
    prompt_from: Int32Array
    eos_ends: BoolArray
    has_extra_stops: BoolArray
    extra_stops: list[frozenset[int]]
    sampling: list[Sampling]
    salt: list[bytes]
    trace: list[str]
    media: list[tuple[MediaItem, ...]]


@attrs.define(eq=False)
class TokenColumns:
    """The committed token list of each request: prompt, then output (HS-1). Writer: output.

    ``known``: tokens committed. ``seated``: int32 ``[slots, max_model_len]``.
    """

    known: Int32Array
    loose: list[Int32Array]
    seated: Int32Array


@attrs.define(eq=False)
class ScheduleColumns:
    """Where a request stands. Writer: the scheduler.

    ``state`` is the scheduler's own enumeration, 0 is free. ``scheduled``: tokens whose KV is
    computed or in a dispatched forward; ``landed``: tokens whose KV is known to be there;
    ``cached``: prompt tokens found in the prefix cache at the latest admission.
    """

    state: UInt8Array
    slot: Int32Array
    scheduled: Int32Array
    landed: Int32Array
    cached: Int32Array


@attrs.define(eq=False)
class OutputColumns:
    """What the client has been told. Writer: output.

    ``owned``: output still owes the client a finish. ``finish`` is a `messages.Finish`.
    """

    owned: BoolArray
    finish: UInt8Array


@attrs.define(eq=False)
class StatsColumns:
    """Moments of a request's life in the loop's clock (seconds, 0: not yet). Writer: request_stats."""

    submitted_s: Float64Array
    first_scheduled_s: Float64Array
    first_token_s: Float64Array
    preemptions: Int32Array


@attrs.define(eq=False)
class RequestTable:
    """Rows of live requests. See the module's docstring for who writes what."""

    capacity: int
    max_len: int
    identity: IdentityColumns
    tokens: TokenColumns
    schedule: ScheduleColumns
    output: OutputColumns
    stats: StatsColumns
    by_rid: dict[str, int] = attrs.field(factory=dict[str, int])
    free_rows: list[int] = attrs.field(factory=list[int])
    next_order: int = 0
    moves: int = 0
    """Rises whenever a row takes or leaves a slot: what was gathered by slot before holds no longer."""

    def add(
        self,
        *,
        rid: str,
        tokens: Int32Array,
        max_new: int,
        sampling: Sampling,
        priority: int = 0,
        logprobs: int = -1,
        prompt_from: int = -1,
        eos_ends: bool = True,
        extra_stops: frozenset[int] = NO_EXTRA_STOPS,
        salt: bytes = b"",
        trace: str = "",
        media: tuple[MediaItem, ...] = NO_MEDIA,
    ) -> int:
        """A row for a new request; ingress calls it once the request has passed its checks.

        Args:
            tokens: int32 ``[prompt_tokens]``, kept as given (read-only).
        Raises: InvariantBroken: the rid already has a row.
        """
        if rid in self.by_rid:
            raise InvariantBroken("two rows for one request id", rid=rid)
        if not self.free_rows:
            self._grow()
        row = self.free_rows.pop()
        self.by_rid[rid] = row
        identity = self.identity
        identity.rid[row] = rid
        identity.prompt_len[row] = len(tokens)
        identity.max_new[row] = max_new
        identity.min_new[row] = sampling.min_new_tokens
        identity.order[row] = self.next_order
        identity.priority[row] = priority
        identity.logprobs[row] = logprobs
        identity.prompt_from[row] = prompt_from
        identity.eos_ends[row] = eos_ends
        identity.extra_stops[row] = extra_stops or NO_EXTRA_STOPS
        identity.has_extra_stops[row] = bool(extra_stops)
        identity.sampling[row] = sampling
        identity.salt[row] = salt
        identity.trace[row] = trace
        identity.media[row] = media
        self.next_order += 1
        self.tokens.known[row] = len(tokens)
        self.tokens.loose[row] = tokens
        self.schedule.slot[row] = NO_SLOT
        for column in (self.schedule.scheduled, self.schedule.landed, self.schedule.cached):
            column[row] = 0
        self.output.owned[row] = True
        self.output.finish[row] = 0
        stats = self.stats
        stats.submitted_s[row] = stats.first_scheduled_s[row] = stats.first_token_s[row] = 0.0
        stats.preemptions[row] = 0
        return row

    def free(self, row: int) -> None:
        """Give the row back. The loop calls it when neither output nor scheduler holds the request."""
        rid = self.identity.rid[row]
        if self.by_rid.pop(rid, None) != row:
            raise InvariantBroken("freeing a row that holds no request", row=row, rid=rid)
        self.identity.rid[row] = ""
        self.identity.extra_stops[row] = NO_EXTRA_STOPS
        self.identity.salt[row] = b""
        self.identity.trace[row] = ""
        self.identity.media[row] = NO_MEDIA
        self.tokens.loose[row] = EMPTY_INT32
        self.tokens.known[row] = 0
        self.schedule.state[row] = 0
        self.schedule.slot[row] = NO_SLOT
        self.output.owned[row] = False
        self.free_rows.append(row)
        self.moves += 1

    def seat(self, row: int, slot: int) -> None:
        """Move the row's tokens into `slot`'s line and note the slot. The scheduler calls it."""
        tokens = self.tokens.loose[row]
        self.tokens.seated[slot, : len(tokens)] = tokens
        self.tokens.loose[row] = EMPTY_INT32
        self.schedule.slot[row] = slot
        self.moves += 1

    def unseat(self, row: int) -> None:
        """Move the row's tokens out of its slot's line; the slot is free for another row."""
        self.tokens.loose[row] = self.tokens_of(row).copy()
        self.schedule.slot[row] = NO_SLOT
        self.moves += 1

    def tokens_of(self, row: int) -> Int32Array:
        """The committed tokens of `row`, int32 ``[known]``; a view that the next commit may extend."""
        slot = int(self.schedule.slot[row])
        if slot == NO_SLOT:
            return self.tokens.loose[row]
        return self.tokens.seated[slot, : int(self.tokens.known[row])]

    def row_of(self, rid: str) -> int | None:
        return self.by_rid.get(rid)

    @property
    def live(self) -> int:
        return len(self.by_rid)

    def _grow(self) -> None:
        old, new = self.capacity, max(16, self.capacity * 2)
        for group in (self.identity, self.tokens, self.schedule, self.output, self.stats):
            for field in attrs.fields(type(group)):
                column = getattr(group, field.name)
                if field.name == "seated":
                    continue
                if isinstance(column, list):
                    column.extend([_blank(field.name)] * (new - old))
                else:
                    grown = np.zeros(new, dtype=column.dtype)
                    grown[:old] = column
                    setattr(group, field.name, grown)
        self.schedule.slot[old:] = NO_SLOT
        self.free_rows.extend(range(new - 1, old - 1, -1))
        self.capacity = new


_BLANK_SAMPLING = Sampling()


def _blank(column: str) -> object:
    blanks: dict[str, object] = {
        "rid": "",
        "extra_stops": NO_EXTRA_STOPS,
        "sampling": _BLANK_SAMPLING,
        "salt": b"",
        "trace": "",
        "media": NO_MEDIA,
        "loose": EMPTY_INT32,
    }
    return blanks[column]


def request_table(*, slots: int, max_len: int) -> RequestTable:
    """An empty table for `slots` residences of at most `max_len` tokens each.

    ``tokens.seated`` is allocated lazily by the kernel: only touched pages cost memory.
    """
    empty_bool: BoolArray = np.zeros(0, dtype=np.bool_)
    empty_f64: Float64Array = np.zeros(0, dtype=np.float64)
    return RequestTable(
        capacity=0,
        max_len=max_len,
        identity=IdentityColumns(
            rid=[],
            prompt_len=_i32(0),
            max_new=_i32(0),
            min_new=_i32(0),
            order=np.zeros(0, dtype=np.int64),
            priority=_i32(0),
            logprobs=_i32(0),
            prompt_from=_i32(0),
            eos_ends=empty_bool,
            has_extra_stops=empty_bool.copy(),
            extra_stops=[],
            sampling=[],
            salt=[],
            trace=[],
            media=[],
        ),
        tokens=TokenColumns(known=_i32(0), loose=[], seated=np.zeros((slots, max_len), dtype=np.int32)),
        schedule=ScheduleColumns(
            state=np.zeros(0, dtype=np.uint8),
            slot=_i32(0),
            scheduled=_i32(0),
            landed=_i32(0),
            cached=_i32(0),
        ),
        output=OutputColumns(owned=empty_bool.copy(), finish=np.zeros(0, dtype=np.uint8)),
        stats=StatsColumns(
            submitted_s=empty_f64.copy(),
            first_scheduled_s=empty_f64.copy(),
            first_token_s=empty_f64.copy(),
            preemptions=_i32(0),
        ),
    )
