"""A scheduler driven by hand: a toy device with real block tables, a toy output side, and checks on every plan.

The toy model's next token depends on every KV entry of the row's context, so a block granted twice,
evicted too early or matched wrongly shows as a wrong token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs
from plan_values import described as described  # noqa: PLC0414 - its users import all of a rig from here
from toy_groups import VOCAB, Device, Taste, is_stop, oracle, plain, taste_of, toy_device
from toy_host import ToyHost, written_blocks

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import FROM_DEVICE, ExecutionPlan, ForwardBatch, Sampling, SnapshotOp, int32
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
from tokenspeed.scheduler.config import Role, SchedulerConfig
from tokenspeed.scheduler.groups import model_groups
from tokenspeed.scheduler.policy import Fcfs
from tokenspeed.scheduler.prefix_index import PrefixIndex
from tokenspeed.scheduler.scheduler import PagedScheduler
from tokenspeed.scheduler.states import State


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


def zeroed(plan: ExecutionPlan) -> set[tuple[int, int]]:
    return {(part.group, block) for part in plan.pages_to_zero for block in part.blocks}


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
    computed_tokens: int = 0
    first_planned_round: int = -1
    taste: Taste = plain
    want: list[int] = attrs.field(factory=list)
    """What the toy model says, once it was asked."""


@attrs.define(eq=False)
class Rig:
    config: SchedulerConfig
    depth: int
    table: RequestTable
    scheduler: PagedScheduler
    device: Device
    host: ToyHost
    requests: list[Request] = attrs.field(factory=list)
    by_row: dict[int, Request] = attrs.field(factory=dict)
    queue: deque[tuple[ForwardBatch, list[int], set[tuple[int, int]]]] = attrs.field(factory=deque)
    mirror: dict[tuple[int, bytes], bytes | None] = attrs.field(factory=dict)
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
        identity = self.table.identity
        taste = taste_of(identity.salt[row], identity.media[row])
        request = Request(row, list(prompt), max_new, eos_ends, prompt_from, taste=taste)
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
        acks = self.host.due()
        if acks:
            self.scheduler.advance_head(HeadFacts(acks=acks))
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
            want = request.want
            if request.out and not want:
                want = request.want = self.wanted(request)
            if request.finish in (Finish.STOP, Finish.LENGTH):
                assert request.out == want, request
            else:
                assert request.out == want[: len(request.out)], request

    def wanted(self, request: Request) -> list[int]:
        """All that the request generates here."""
        specs, taste = self.config.specs, request.taste
        most = 1 if self.config.role is Role.PREFILL else request.max_new
        return oracle(request.prompt, most, eos_ends=request.eos_ends, specs=specs, taste=taste)

    def check_idle(self) -> None:
        """Nothing is held and nothing leaked."""
        self.host.delay, self.host.held = 0, set()
        while self.plan().cache or self.host.pending:
            pass
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
        # One image for each victim that has one (KM-10).
        imaged = [row for row in plan.preempted if self.scheduler.life.of(row) is State.IMAGING]
        assert sum(isinstance(op, SnapshotOp) for op in plan.device_ops()) == len(imaged)
        for row in plan.retired:
            request = self.by_row.pop(row)
            assert request.finish is not Finish.RUNNING
            assert not self.scheduler.holds(row)
            request.retired = True
            self.table.free(row)
        for row in plan.seated:
            # What a client is told of its prompt, also when it comes back with tokens of its own.
            assert self.table.schedule.cached[row] < len(self.by_row[row].prompt)
        in_use = set().union(*(blocks for _, _, blocks in self.queue)) if self.queue else set()
        assert not in_use & zeroed(plan)
        copied = {(copy.group, copy.destination) for copy in plan.pages_to_copy}
        assert len(copied) == len(plan.pages_to_copy)
        assert not copied & zeroed(plan)
        loaded = written_blocks(plan)
        assert len(set(loaded)) == len(loaded)
        assert not set(loaded) & (zeroed(plan) | copied | in_use)
        if plan.batch is not None:
            self._check_batch(plan, plan.batch)
        self.host.stores(plan)
        self.device.prepare(plan)
        self.host.loads(plan)
        tokens = self.device.forward(plan)
        if plan.batch is not None:
            self.queue.append((plan.batch, tokens, self._blocks_of(plan.batch)))
        if self.audited:
            self.audit()

    def _blocks_of(self, batch: ForwardBatch) -> set[tuple[int, int]]:
        """Blocks that a forward reads or writes."""
        used = set()
        for group in model_groups(self.config):
            table = self.device.tables[group.number]
            for slot, start, count in zip(
                batch.slots.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True
            ):
                line = table[slot, group.first_seen(start) : group.blocks_for(start + count)]
                used |= {(group.number, block) for block in line.tolist()}
        return used

    def _check_batch(self, plan: ExecutionPlan, batch: ForwardBatch) -> None:
        rows, config = batch.rows.tolist(), self.config
        assert len(set(rows)) == len(rows)
        assert 0 < batch.num_tokens <= config.max_batched_tokens
        assert len(rows) <= config.max_num_seqs
        assert all(not array.flags.writeable for array in batch)
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
            request.computed_tokens += count
            if request.first_planned_round < 0:
                request.first_planned_round = plan.round_id
        for grant in plan.grants:
            assert (grant.blocks > 0).all()
            assert (grant.blocks < config.num_pages * config.specs[grant.group].blocks_per_parent).all()
        self._check_grants(plan)

    def _check_grants(self, plan: ExecutionPlan) -> None:
        """Grants go to present holders; a block that a forward in flight uses is not given to someone new."""
        pool, cache = self.scheduler.pool, self.scheduler.cache
        for grant in plan.grants:
            lines = self.scheduler.residents.state.groups[grant.group]
            assert (lines.blocks[grant.slots, grant.indices] == grant.blocks).all()
            assert (grant.indices >= lines.first[grant.slots]).all()
            assert (grant.indices < lines.held[grant.slots]).all()
        in_use = set().union(*(blocks for _, _, blocks in self.queue)) if self.queue else set()
        granted = {(grant.group, block) for grant in plan.grants for block in grant.blocks.tolist()}
        for group, block in granted & in_use:
            assert pool.references(group, block) > 1 or cache.keeps(group, block)
        plain = self.config.role is Role.PLAIN and not self.config.host_parents
        if plan.seated and plain and [spec.kind for spec in self.config.specs] == ["full"]:
            # Whoever was admitted left a spare block for each of the others. (A write-through may then pin some.)
            spare = pool.empty + pool.cached - pool.contents().promised[0]
            assert spare >= self.scheduler.residents.seated - 1

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
            self.check_events()
            self.audit()

    def check_events(self) -> None:
        """All events so far, replayed, give what subscribers are to know of the index."""
        if self.config.kv_events:
            assert set(self.mirror) == self._routable()

    def _routable(self) -> set[tuple[int, bytes]]:
        """What subscribers are told of: whole blocks of groups by position."""
        cache, page = self.scheduler.cache, 4 * self.config.page_tokens
        if not isinstance(cache, PrefixIndex):
            return set()
        return {
            (group.number, name)
            for group, index in zip(model_groups(self.config), cache.indexes, strict=True)
            if group.by_position
            for name, entry in index.state.entries.items()
            if not len(entry[2]) % page
        }

    def _replay(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                assert len(event.token_ids) == event.block_tokens * len(event.hashes)
                parent = event.parent
                # A window's blocks stand alone. So may others: a copy to the host, or a neighbour in their parent,
                # keeps them for longer than what they extend.
                alone = len(self.config.specs) > 1 or self.config.specs[0].kind != "full" or self.config.host_parents
                for name in event.hashes:
                    assert parent is None or alone or (event.group, parent) in self.mirror
                    assert (event.group, name) not in self.mirror
                    self.mirror[event.group, name] = parent
                    parent = name
            case BlockRemoved():
                for name in event.hashes:
                    del self.mirror[event.group, name]
            case AllBlocksCleared():
                self.mirror.clear()

    def audit(self) -> None:
        snapshot = self.scheduler.snapshot()
        audit(snapshot, self.config, self.table)
        counts = self.scheduler.sizes()
        assert counts.held == len(snapshot.states)
        empty = self.scheduler.empty_lcm_blocks()
        assert empty == len(snapshot.empty)
        active, cached = set(), set()
        for part, spec in zip(snapshot.groups, self.config.specs, strict=True):
            active |= {block // spec.blocks_per_parent for block in part.references}
            cached |= {block // spec.blocks_per_parent for block in part.idle}
        assert self.scheduler.active_lcm_blocks() == len(active)
        assert self.scheduler.available_lcm_blocks() == empty + len(cached - active)
        assert self.scheduler.num_usable_pages == self.config.num_pages - 1


def build(settings: SchedulerConfig | None = None, *, policy: SchedulingPolicy | None = None, **changes: object) -> Rig:
    settings = settings or config(**changes)
    table = request_table(slots=settings.request_slots, max_len=settings.max_model_len)
    scheduler = build_scheduler(settings, table, policy or Fcfs())
    device = toy_device(settings)
    rig = Rig(
        config=settings,
        depth=settings.overlap_schedule_depth,
        table=table,
        scheduler=scheduler,
        device=device,
        host=ToyHost(device),
    )
    device.tastes = lambda row: rig.by_row[row].taste
    return rig


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Deterministic ids, different for each seed."""
    return [(seed * 7919 + at * 31 + 1) % VOCAB for at in range(length)]
