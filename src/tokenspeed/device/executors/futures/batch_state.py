"""What the worker knows of requests: copies on the host, derived from the plans and from materialised samples.

The control plane's committed tokens are the authority (HS-1). A token that a plan names and that is
known here must be the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np

from tokenspeed.device.executors.slots import SlotState
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import FROM_DEVICE, BlockGrants, Dispatch, ForwardBatch, Seat
from tokenspeed.plane.table import Int64Array

UNKNOWN = -1
GONE = -1


@attrs.define(eq=False)
class TokenTable:
    """``token_ids_cpu``: the tokens of each slot's request, by position. Writer: InputBatch, under its lock.

    Attributes:
        stored: int32 ``[slots, max_len]``, token + 1, 0 where unknown, so that memory is taken only
            where tokens are.
        filled: int64 ``[slots]``, positions from there on are unknown.
    """

    stored: Int32Array
    filled: Int64Array

    def put(self, slots: Int64Array, positions: Int64Array, tokens: Int64Array) -> None:
        """Several slots may occur several times.

        Raises: InvariantBroken: a token is known and is another one.
        """
        known = self.stored[slots, positions]
        if ((known != 0) & (known != tokens + 1)).any():
            raise InvariantBroken("a plan contradicts the tokens of the worker", slots=slots, positions=positions)
        self.stored[slots, positions] = tokens + 1
        np.maximum.at(self.filled, slots, positions + 1)

    def get(self, slots: Int64Array, positions: Int64Array) -> Int64Array:
        """int64, UNKNOWN where nothing is known."""
        found: Int64Array = self.stored[slots, positions].astype(np.int64) - 1
        return found

    def clear(self, slot: int) -> None:
        self.stored[slot, : self.filled[slot]] = 0
        self.filled[slot] = 0


@attrs.define(eq=False)
class RequestState:
    """One request of the worker. Writer: InputBatch, under its lock.

    Attributes:
        req_id: its name in this worker; another one after each seating.
        slot: GONE while it has none.
        output_token_ids: sampled and materialised, in order; UNKNOWN for steps that were not, which
            on ranks other than the output rank is most of them.
        computed: tokens whose KV is there once the forwards queued so far have run.
    """

    req_id: str
    row: int
    slot: int
    prompt_len: int
    seatings: int = 1
    computed: int = 0
    output_token_ids: list[int] = attrs.field(factory=list[int])


@attrs.frozen(kw_only=True, eq=False)
class SchedulerOutput:
    """One plan as the worker sees it.

    Attributes:
        num_scheduled_tokens: tokens of each request of the batch, in the batch's order.
        finished: rows that ended since the output before.
    """

    batch: ForwardBatch
    grants: tuple[BlockGrants, ...]
    dispatch: Dispatch
    num_scheduled_tokens: Mapping[str, int]
    finished: tuple[int, ...]


@attrs.frozen(kw_only=True, eq=False)
class Sampled:
    """Who gets the tokens of a step: taken before the batch state moves on.

    Attributes:
        requests: of the sampled rows, in batch order.
        positions: int64 ``[s]``, where each new token goes in its sequence.
    """

    requests: tuple[RequestState, ...]
    positions: Int64Array


@attrs.define(eq=False)
class InputBatchState:
    """Writers: ``ts-forward`` and the output thread, under `lock`, which nobody holds while waiting.

    Attributes:
        requests: by row of the request table.
        seated: by slot.
    """

    tokens: TokenTable
    requests: dict[int, RequestState] = attrs.field(factory=dict[int, RequestState])
    seated: dict[int, RequestState] = attrs.field(factory=dict[int, RequestState])
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.frozen(kw_only=True, eq=False)
class InputBatch:
    """Requests, their tokens and their slots. Build it with `input_batch`.

    Attributes:
        slots: block tables and owners; ``ts-forward`` only.
    """

    slots: SlotState
    state: InputBatchState

    def view(
        self, batch: ForwardBatch, grants: tuple[BlockGrants, ...], dispatch: Dispatch, finished: tuple[int, ...]
    ) -> SchedulerOutput:
        """The plan as a `SchedulerOutput`; changes nothing."""
        requests, gone = self.state.requests, frozenset(finished)
        names = {}
        for seat in dispatch.seats:
            known = None if seat.row in gone else requests.get(seat.row)
            names[seat.row] = _name(seat, 1 if known is None else known.seatings + 1)
        counts = batch.counts.tolist()
        scheduled = {}
        for row, count in zip(batch.rows.tolist(), counts, strict=True):
            request = requests.get(row)
            name = names.get(row) or (request.req_id if request is not None and row not in gone else f"row {row}")
            scheduled[name] = count
        return SchedulerOutput(
            batch=batch,
            grants=grants,
            dispatch=dispatch,
            num_scheduled_tokens=MappingProxyType(scheduled),
            finished=finished,
        )

    def update_states(self, output: SchedulerOutput) -> None:
        """Ended requests go, seated ones come, granted blocks and the plan's tokens are noted."""
        self.seat(output.dispatch.seats, output.grants, output.finished)
        batch = output.batch
        counts = batch.counts.astype(np.int64)
        row = np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts
        if len(row) != len(batch.input_ids):
            raise InvariantBroken("a batch whose counts do not fit its tokens", counts=counts)
        positions = batch.starts.astype(np.int64)[row] + np.arange(len(row)) - firsts[row]
        here = batch.input_ids != FROM_DEVICE
        slots = batch.slots.astype(np.int64)
        ends = (batch.starts + batch.counts).tolist()
        with self.state.lock:
            if positions.max(initial=0) >= self.state.tokens.stored.shape[1]:
                raise InvariantBroken("a context longer than a block table", tokens=positions.max())
            for slot, request_row, end in zip(slots.tolist(), batch.rows.tolist(), ends, strict=True):
                request = self.state.seated.get(slot)
                if request is None or request.row != request_row:
                    raise InvariantBroken("a row in a slot it does not own", row=request_row, slot=slot)
                request.computed = end
            if here.any():
                self.state.tokens.put(slots[row][here], positions[here], batch.input_ids[here].astype(np.int64))

    def seat(self, seats: tuple[Seat, ...], grants: tuple[BlockGrants, ...], finished: tuple[int, ...]) -> None:
        for seat in seats:
            self.slots.seat(seat)
        for changes in grants:
            self.slots.grant(changes)
        with self.state.lock:
            for row in finished:
                self._forget(row)
            for seat in seats:
                self._add(seat)

    def update_with_samples(self, sampled: Sampled, tokens: list[int]) -> None:
        """Materialised samples reach ``token_ids_cpu`` and ``output_token_ids``; from either thread.

        In any order: a break materialises the latest output, maybe ahead of the output thread.
        """
        with self.state.lock:
            for request, position, token in zip(sampled.requests, sampled.positions.tolist(), tokens, strict=True):
                ids, at = request.output_token_ids, position - request.prompt_len
                ids.extend([UNKNOWN] * (at + 1 - len(ids)))
                ids[at] = token
            here = [i for i, request in enumerate(sampled.requests) if request.slot != GONE]
            if here:
                slots = np.array([sampled.requests[i].slot for i in here], dtype=np.int64)
                positions, values = sampled.positions[here], np.array(tokens, dtype=np.int64)[here]
                inside = positions < self.state.tokens.stored.shape[1]  # a last token needs no place
                self.state.tokens.put(slots[inside], positions[inside], values[inside])

    def tokens_at(self, slots: Int64Array, positions: Int64Array) -> Int64Array:
        with self.state.lock:
            return self.state.tokens.get(slots, positions)

    def requests_of(self, batch: ForwardBatch) -> tuple[RequestState, ...]:
        return tuple(self.state.seated[slot] for slot in batch.slots.tolist())

    @property
    def empty(self) -> bool:
        return not self.state.requests

    def _add(self, seat: Seat) -> None:
        """A new request, or one that was retracted and whose output is known."""
        state = self.state
        before = state.seated.pop(seat.slot, None)
        if before is not None:
            before.slot = GONE
        request = state.requests.get(seat.row)
        if request is None:
            request = RequestState(req_id=_name(seat, 1), row=seat.row, slot=seat.slot, prompt_len=seat.prompt_len)
        else:
            if request.slot != GONE:
                del state.seated[request.slot]
            request.seatings += 1
            request.req_id, request.slot = _name(seat, request.seatings), seat.slot
        state.requests[seat.row], state.seated[seat.slot] = request, request
        state.tokens.clear(seat.slot)
        output = np.array(request.output_token_ids, dtype=np.int64)
        known = np.flatnonzero(output != UNKNOWN)
        slots = np.full(len(known), seat.slot, dtype=np.int64)
        state.tokens.put(slots, request.prompt_len + known, output[known])

    def _forget(self, row: int) -> None:
        request = self.state.requests.pop(row, None)
        if request is not None and request.slot != GONE:
            del self.state.seated[request.slot]
            request.slot = GONE


def _name(seat: Seat, seatings: int) -> str:
    return seat.rid if seatings == 1 else f"{seat.rid}~{seatings}"


def input_batch(slots: SlotState, *, max_model_len: int) -> InputBatch:
    count = len(slots.owners)
    tokens = TokenTable(stored=np.zeros((count, max_model_len), dtype=np.int32), filled=np.zeros(count, dtype=np.int64))
    return InputBatch(slots=slots, state=InputBatchState(tokens=tokens))
