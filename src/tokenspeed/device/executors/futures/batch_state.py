"""What the worker knows of requests: copies on the host, derived from the plans and from materialised samples.

The control plane's committed tokens are the authority (HS-1). A token that a plan names and that is
known here must be the same one.
"""

from __future__ import annotations

import threading

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
    """

    req_id: str
    row: int
    slot: int
    prompt_len: int
    seatings: int = 1
    output_token_ids: list[int] = attrs.field(factory=list[int])


@attrs.frozen(kw_only=True, eq=False)
class SchedulerOutput:
    """One plan as the worker sees it.

    Attributes:
        req_ids: the batch's requests, in its order.
        finished: rows that ended since the output before.
    """

    batch: ForwardBatch
    grants: tuple[BlockGrants, ...]
    dispatch: Dispatch
    req_ids: tuple[str, ...]
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


@attrs.frozen(kw_only=True, eq=False)
class Company:
    """The requests of the latest batch, so that a batch of the same rows need not look them up again."""

    rows: Int64Array
    req_ids: tuple[str, ...]
    requests: tuple[RequestState, ...]


NOBODY_YET = Company(rows=np.zeros(0, dtype=np.int32), req_ids=(), requests=())


@attrs.define(eq=False)
class InputBatchState:
    """Writers: ``ts-forward`` and the output thread, under `lock`, which nobody holds while waiting.

    Attributes:
        prompt_len: int64 ``[slots]``, of the slot's request.
        computed: int64 ``[slots]``, tokens whose KV is there once the forwards queued so far have run.
        requests: by row of the request table.
        seated: by slot.
    """

    tokens: TokenTable
    prompt_len: Int64Array
    computed: Int64Array
    company: Company = NOBODY_YET
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
        company = self.state.company
        same = not dispatch.seats and not finished and np.array_equal(batch.rows, company.rows)
        names = company.req_ids if same else self._names(batch, dispatch, frozenset(finished))
        return SchedulerOutput(batch=batch, grants=grants, dispatch=dispatch, req_ids=names, finished=finished)

    def _names(self, batch: ForwardBatch, dispatch: Dispatch, gone: frozenset[int]) -> tuple[str, ...]:
        requests = {row: request for row, request in self.state.requests.items() if row not in gone}
        names = {row: request.req_id for row, request in requests.items()}
        for seat in dispatch.seats:
            known = requests.get(seat.row)
            names[seat.row] = _name(seat, 1 if known is None else known.seatings + 1)
        return tuple(names.get(row, f"row {row}") for row in batch.rows.tolist())

    def update_states(self, output: SchedulerOutput) -> None:
        """Ended requests go, seated ones come, granted blocks and the plan's tokens are noted."""
        self.seat(output.dispatch.seats, output.grants, output.finished)
        batch, state = output.batch, self.state
        if not np.array_equal(batch.rows, state.company.rows):
            requests = tuple(self._owner(*at) for at in zip(batch.slots.tolist(), batch.rows.tolist(), strict=True))
            state.company = Company(rows=batch.rows, req_ids=output.req_ids, requests=requests)
        ends = batch.starts + batch.counts
        if ends.max(initial=0) > state.tokens.stored.shape[1]:
            raise InvariantBroken("a context longer than a block table", tokens=ends.max())
        with state.lock:
            state.computed[batch.slots] = ends
            self._note_tokens(batch)

    def _note_tokens(self, batch: ForwardBatch) -> None:
        """The tokens that the plan names."""
        here = batch.input_ids != FROM_DEVICE
        if not here.any():
            return
        counts = batch.counts.astype(np.int64)
        row = np.repeat(np.arange(len(counts)), counts)
        if len(row) != len(batch.input_ids):
            raise InvariantBroken("a batch whose counts do not fit its tokens", counts=counts)
        firsts = np.cumsum(counts) - counts
        positions = batch.starts.astype(np.int64)[row] + np.arange(len(row)) - firsts[row]
        slots = batch.slots.astype(np.int64)[row]
        self.state.tokens.put(slots[here], positions[here], batch.input_ids[here].astype(np.int64))

    def _owner(self, slot: int, row: int) -> RequestState:
        request = self.state.seated.get(slot)
        if request is None or request.row != row:
            raise InvariantBroken("a row in a slot it does not own", row=row, slot=slot)
        return request

    def seat(self, seats: tuple[Seat, ...], grants: tuple[BlockGrants, ...], finished: tuple[int, ...]) -> None:
        for seat in seats:
            self.slots.seat(seat)
        for changes in grants:
            self.slots.grant(changes)
        if seats or finished:
            self.state.company = NOBODY_YET
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

    def all_past_their_prompts(self, batch: ForwardBatch) -> bool:
        return bool((batch.starts >= self.state.prompt_len[batch.slots]).all())

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
        state.prompt_len[seat.slot], state.computed[seat.slot] = seat.prompt_len, 0
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

    def zeros() -> Int64Array:
        return np.zeros(count, dtype=np.int64)

    tokens = TokenTable(stored=np.zeros((count, max_model_len), dtype=np.int32), filled=zeros())
    return InputBatch(slots=slots, state=InputBatchState(tokens=tokens, prompt_len=zeros(), computed=zeros()))
