"""A scheduler driven by hand: a toy device with real block tables, a toy output side, and checks on every plan.

The toy model's next token depends on every KV entry of the row's context, so a block granted twice,
evicted too early or matched wrongly shows as a wrong token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from tokenspeed.plane.messages import Finish, Int32Array
from tokenspeed.plane.plan import FROM_DEVICE, ExecutionPlan, ForwardBatch, Sampling, int32
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.results import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ForwardLanded,
    HeadFacts,
    KvEvent,
    StorageTick,
    SubmitResult,
)
from tokenspeed.plane.table import RequestTable, request_table
from tokenspeed.scheduler.audit import audit
from tokenspeed.scheduler.build import build_scheduler
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.policy import Fcfs
from tokenspeed.scheduler.scheduler import PagedScheduler

VOCAB = 50
MASK = (1 << 63) - 1
GARBAGE = 0x5EED


def mix(before: int, token: int) -> int:
    return (before * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK


def is_stop(token: int) -> bool:
    return token % 17 == 0


def oracle(prompt: Sequence[int], max_new: int, *, eos_ends: bool) -> list[int]:
    """What the toy model generates for `prompt`, alone."""
    state, total, out = 0, 0, []
    for token in prompt:
        state = mix(state, token)
        total ^= state
    while len(out) < max_new:
        token = total % VOCAB
        out.append(token)
        if eos_ends and is_stop(token):
            break
        state = mix(state, token)
        total ^= state
    return out


def config(**changes: object) -> SchedulerConfig:
    base = SchedulerConfig(
        max_num_seqs=8,
        max_batched_tokens=64,
        chunk_tokens=16,
        page_tokens=4,
        num_pages=65,
        max_model_len=128,
        resume_headroom_tokens=8,
    )
    return attrs.evolve(base, **changes)  # type: ignore[arg-type]


def zeroed(plan: ExecutionPlan) -> set[int]:
    return {block for group in plan.pages_to_zero for block in group.blocks}


@attrs.define(eq=False)
class Device:
    """Block tables by slot, KV as numbers, the last sampled token by slot."""

    config: SchedulerConfig
    kv: list[list[int]]
    tables: Int32Array
    last: dict[int, tuple[int, int, int]] = attrs.field(factory=dict)  # slot -> row, position, token

    def run(self, plan: ExecutionPlan) -> list[int]:
        for block in zeroed(plan):
            self.kv[block] = [0] * self.config.page_tokens
        for grant in plan.grants:
            self.tables[grant.slots, grant.indices] = grant.blocks
        assert plan.batch is not None
        return self._forward(plan.batch)

    def _forward(self, batch: ForwardBatch) -> list[int]:
        page, tokens, at = self.config.page_tokens, [], 0
        for row, slot, start, count, samples in zip(
            batch.rows.tolist(),
            batch.slots.tolist(),
            batch.starts.tolist(),
            batch.counts.tolist(),
            batch.samples.tolist(),
            strict=True,
        ):
            line = self.tables[slot].tolist()
            state = self.kv[line[(start - 1) // page]][(start - 1) % page] if start else 0
            for position in range(start, start + count):
                token = int(batch.input_ids[at])
                at += 1
                if token == FROM_DEVICE:
                    owner, sampled_at, token = self.last[slot]
                    assert (owner, sampled_at) == (row, position), "the slot's latest token is another one"
                state = mix(state, token)
                self.kv[line[position // page]][position % page] = state
            if samples:
                total = 0
                for position in range(start + count):
                    total ^= self.kv[line[position // page]][position % page]
                tokens.append(total % VOCAB)
                self.last[slot] = (row, start + count, tokens[-1])
        assert at == len(batch.input_ids)
        return tokens


@attrs.define(eq=False)
class Request:
    row: int
    prompt: list[int]
    max_new: int
    eos_ends: bool
    prompt_from: int
    out: list[int] = attrs.field(factory=list)
    finish: Finish = Finish.RUNNING
    retired: bool = False
    forwards: int = 0
    decodes: int = 0
    preempted: int = 0
    computed: set[int] = attrs.field(factory=set)
    first_planned_round: int = -1


@attrs.define(eq=False)
class Rig:
    config: SchedulerConfig
    depth: int
    table: RequestTable
    scheduler: PagedScheduler
    device: Device
    requests: list[Request] = attrs.field(factory=list)
    by_row: dict[int, Request] = attrs.field(factory=dict)
    queue: deque[tuple[ForwardBatch, list[int], set[int]]] = attrs.field(factory=deque)
    mirror: dict[bytes, bytes | None] = attrs.field(factory=dict)
    events: list[KvEvent] = attrs.field(factory=list)
    rounds: int = 0
    audited: bool = True

    # ---- what a loop does -----------------------------------------------------------------------

    def add(self, prompt: Sequence[int], *, max_new: int = 4, eos_ends: bool = False, **more: object) -> Request:
        """A row, not submitted yet."""
        row = self.table.add(
            rid=f"r{len(self.requests)}",
            tokens=int32(prompt),
            max_new=max_new,
            sampling=Sampling(),
            eos_ends=eos_ends,
            **more,  # type: ignore[arg-type]
        )
        prompt_from = int(self.table.identity.prompt_from[row])
        request = Request(row, list(prompt), max_new, eos_ends, prompt_from)
        self.requests.append(request)
        self.by_row[row] = request
        return request

    def submit(self, *requests: Request) -> SubmitResult:
        return self.scheduler.submit([request.row for request in requests])

    def new(self, prompt: Sequence[int], **more: object) -> Request:
        request = self.add(prompt, **more)  # type: ignore[arg-type]
        self.submit(request)
        return request

    def abort(self, *requests: Request) -> None:
        for request in requests:
            if request.finish is Finish.RUNNING:
                self._finish(request, Finish.ABORT)
        self.scheduler.abort([request.row for request in requests])

    def permit(self, *, forward: bool) -> None:
        self.scheduler.advance_head(HeadFacts(tick=StorageTick(forward=forward)))

    def plan(self) -> ExecutionPlan:
        """Plan and dispatch; nothing lands."""
        plan = self.scheduler.next_execution_plan()
        self.rounds += 1
        self._apply(plan)
        return plan

    def land(self, *, down_to: int = 0) -> list[ForwardLanded]:
        """Commit the oldest forwards and advance."""
        landed = []
        while len(self.queue) > down_to:
            batch, tokens, _ = self.queue.popleft()
            landed.append(self._commit(batch, tokens))
        if landed:
            self.scheduler.advance(landed)
        self._drain()
        return landed

    def round(self) -> ExecutionPlan:
        plan = self.plan()
        self.land(down_to=self.depth if plan.batch is not None else 0)
        return plan

    def run(self, *, rounds: int = 500, until: Callable[[], bool] | None = None) -> list[ExecutionPlan]:
        """Rounds until nothing is held (or `until`); fails if that does not come."""
        plans = []
        for _ in range(rounds):
            if until() if until else not self.scheduler.sizes().held:
                return plans
            plans.append(self.round())
        raise AssertionError(f"not done after {rounds} rounds: {self.scheduler.sizes()}")

    def check_tokens(self) -> None:
        """Every stream is the beginning of what the toy model says, and complete unless it was aborted."""
        for request in self.requests:
            want = oracle(request.prompt, request.max_new, eos_ends=request.eos_ends)
            if request.finish in (Finish.STOP, Finish.LENGTH):
                assert request.out == want, request
            else:
                assert request.out == want[: len(request.out)], request

    def check_idle(self) -> None:
        """Nothing is held and nothing leaked."""
        assert self.scheduler.sizes().held == 0
        assert self.scheduler.active_lcm_blocks() == 0
        assert self.scheduler.available_lcm_blocks() == self.scheduler.num_usable_pages
        assert self.table.live == 0
        assert self.scheduler.clear_cache()
        assert self.scheduler.empty_lcm_blocks() == self.scheduler.num_usable_pages

    def blocks(self, request: Request) -> tuple[int, ...]:
        return self.scheduler.snapshot().tables.get(request.row, ())

    # ---- checks and bookkeeping -------------------------------------------------------------------

    def _apply(self, plan: ExecutionPlan) -> None:
        for abort in plan.aborts:
            request = self.by_row[abort.row]
            assert request.finish is Finish.RUNNING
            assert abort.row in plan.retired
            self._finish(request, Finish.ABORT)
        for row in plan.preempted:
            self.by_row[row].preempted += 1
        for row in plan.retired:
            request = self.by_row.pop(row)
            assert request.finish is not Finish.RUNNING
            assert not self.scheduler.holds(row)
            request.retired = True
            self.table.free(row)
        in_use = set().union(*(blocks for _, _, blocks in self.queue)) if self.queue else set()
        assert not in_use & zeroed(plan)
        if plan.batch is not None:
            self._check_batch(plan, plan.batch)
            tokens = self.device.run(plan)
            self.queue.append((plan.batch, tokens, self._blocks_of(plan.batch)))
        if self.audited:
            self.audit()

    def _blocks_of(self, batch: ForwardBatch) -> set[int]:
        ends = batch.starts + batch.counts
        lines = zip(batch.slots.tolist(), ends.tolist(), strict=True)
        return {
            block for slot, end in lines for block in self.device.tables[slot, : self.config.blocks_for(end)].tolist()
        }

    def _check_batch(self, plan: ExecutionPlan, batch: ForwardBatch) -> None:
        rows, config = batch.rows.tolist(), self.config
        assert len(set(rows)) == len(rows)
        assert 0 < batch.num_tokens <= config.max_batched_tokens
        assert all(not array.flags.writeable for array in attrs.astuple(batch, recurse=False))
        at = 0
        columns = (batch.slots, batch.starts, batch.counts, batch.samples)
        for row, slot, start, count, samples in zip(rows, *(column.tolist() for column in columns), strict=True):
            request = self.by_row[row]
            assert self.table.schedule.slot[row] == slot
            known = self.table.tokens_of(row).tolist()
            ids = batch.input_ids[at : at + count].tolist()
            at += count
            assert start + count <= len(request.prompt) + request.max_new - 1
            if ids == [FROM_DEVICE]:
                assert samples
                assert start >= len(request.prompt)
                request.decodes += 1
            else:
                assert ids == known[start : start + count]
                assert count <= config.chunk_tokens
                assert samples == (start + count == len(known))
            request.forwards += 1
            request.computed.update(range(start, start + count))
            if request.first_planned_round < 0:
                request.first_planned_round = plan.round_id
        for grant in plan.grants:
            assert (grant.blocks > 0).all()
            assert (grant.blocks < config.num_pages).all()
        if self.audited:
            self._check_grants(plan)

    def _check_grants(self, plan: ExecutionPlan) -> None:
        """Grants go to present holders; a block that a forward in flight uses is not given to someone new."""
        snapshot = self.scheduler.snapshot()
        owned = {block for blocks in snapshot.tables.values() for block in blocks}
        granted = {block for grant in plan.grants for block in grant.blocks.tolist()}
        assert granted <= owned
        in_use = set().union(*(blocks for _, _, blocks in self.queue)) if self.queue else set()
        shared = {block for block, count in snapshot.references.items() if count > 1} | set(snapshot.index.values())
        assert granted & in_use <= shared
        if plan.seated:
            # Whoever was admitted left a spare block for each of the others.
            spare = len(snapshot.empty) + len(snapshot.idle) - snapshot.promised
            assert spare >= len(snapshot.tables) - 1

    def _commit(self, batch: ForwardBatch, tokens: list[int]) -> ForwardLanded:
        finished = []
        for row, token in zip(batch.rows[batch.samples].tolist(), tokens, strict=True):
            request = self.by_row[row]
            if request.finish is not Finish.RUNNING:
                continue
            slot, known = int(self.table.schedule.slot[row]), int(self.table.tokens.known[row])
            self.table.tokens.seated[slot, known] = token
            self.table.tokens.known[row] = known + 1
            request.out.append(token)
            if request.eos_ends and is_stop(token):
                self._finish(request, Finish.STOP)
            elif len(request.out) == request.max_new:
                self._finish(request, Finish.LENGTH)
            if request.finish is not Finish.RUNNING:
                finished.append(row)
        return ForwardLanded(batch=batch, finished=tuple(finished))

    def _finish(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        self.table.output.owned[request.row] = False
        self.table.output.finish[request.row] = finish

    def _drain(self) -> None:
        events = self.scheduler.drain_kv_events()
        self.events.extend(events)
        for event in events:
            self._replay(event)
        if self.audited:
            assert self.scheduler.drain_kv_events() == ()
            if self.config.kv_events:
                assert set(self.mirror) == set(self.scheduler.snapshot().index)
            self.audit()

    def _replay(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                assert len(event.token_ids) == event.block_tokens * len(event.hashes)
                parent = event.parent
                for name in event.hashes:
                    assert parent is None or parent in self.mirror
                    assert name not in self.mirror
                    self.mirror[name] = parent
                    parent = name
            case BlockRemoved():
                for name in event.hashes:
                    del self.mirror[name]
            case AllBlocksCleared():
                self.mirror.clear()

    def audit(self) -> None:
        snapshot = self.scheduler.snapshot()
        audit(snapshot, self.config, self.table)
        counts = self.scheduler.sizes()
        assert counts.held == len(snapshot.states)
        empty, idle = self.scheduler.empty_lcm_blocks(), len(snapshot.idle)
        assert empty == len(snapshot.empty)
        assert self.scheduler.available_lcm_blocks() == empty + idle
        assert self.scheduler.active_lcm_blocks() == len(snapshot.references)
        assert self.scheduler.num_usable_pages == self.config.num_pages - 1


def build(settings: SchedulerConfig | None = None, *, policy: SchedulingPolicy | None = None, **changes: object) -> Rig:
    settings = settings or config(**changes)
    table = request_table(slots=settings.max_num_seqs, max_len=settings.max_model_len)
    width = settings.blocks_for(settings.max_model_len)
    return Rig(
        config=settings,
        depth=settings.overlap_schedule_depth,
        table=table,
        scheduler=build_scheduler(settings, table, policy or Fcfs()),
        device=Device(
            settings,
            [[GARBAGE] * settings.page_tokens for _ in range(settings.num_pages)],
            np.zeros((settings.max_num_seqs, width), dtype=np.int32),
        ),
    )


def described(plan: ExecutionPlan) -> tuple[object, ...]:
    """A plan as nested tuples, for comparison."""

    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            return (str(value.dtype), tuple(value.tolist()))
        if attrs.has(type(value)):
            return tuple(plain(part) for part in attrs.astuple(value, recurse=False))
        if isinstance(value, tuple):
            return tuple(plain(part) for part in value)
        return value

    return tuple(plain(part) for part in attrs.astuple(plan, recurse=False))


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Deterministic ids, different for each seed."""
    return [(seed * 7919 + at * 31 + 1) % VOCAB for at in range(length)]
