"""One scheduler with all that it talks to: a toy device, a host tier, a storage backend, a peer, and the rules."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from model_seen import Seen
from scheduler_rig import Request, Rig, build
from toy_peer import ToyPeer
from toy_storage import StoredRig, group_of

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.control.l3 import AgreedStorage
from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import ExecutionPlan, LoadBackOp, RestoreOp, StorageVerb, WriteBackOp
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.results import Accepted, HeadFacts, Rejected, StorageDone, StorageTick, SubmitResult
from tokenspeed.scheduler.config import Role, SchedulerConfig
from tokenspeed.scheduler.host.tier import HostTier
from tokenspeed.scheduler.names import root_name
from tokenspeed.scheduler.prefix_index import PrefixIndex
from tokenspeed.testing.storage import ScriptedStorage


@attrs.define(eq=False)
class Node:
    """Attributes:
    given_up: storage operations that a CANCEL names.
    told: completions of storage operations so far, to be repeated.
    """

    rig: Rig
    peer: ToyPeer
    stored: StoredRig | None
    seen: Seen
    given_up: set[int] = attrs.field(factory=set)
    told: list[StorageDone] = attrs.field(factory=list)

    # ---- what a loop does -----------------------------------------------------------------------

    def plan(self) -> ExecutionPlan:
        rig, stored = self.rig, self.stored
        # Of what is already known the rows are free once the plan is made.
        plan = rig.plan() if stored is None else stored.plan()
        if stored is not None:
            self.told.extend(stored.ticks[-1].completed)
            self.given_up |= {op.op_id for op in plan.storage_ops() if op.verb is StorageVerb.CANCEL}
        self.peer.note(plan)
        self.seen.plan(rig, plan)
        return plan

    def round(self) -> ExecutionPlan:
        plan = self.plan()
        self.rig.land(down_to=self.rig.depth if plan.batch is not None else 0)
        for row in self.peer.due():
            self.end_transfer(row, ok=True)
        return plan

    def submit(self, prompt: list[int], *, copies: int, max_new: int, eos_ends: bool, **more: object) -> SubmitResult:
        rig = self.rig
        if rig.config.role is Role.PREFILL:
            # What ends the request there is the transfer.
            max_new, eos_ends = max_new + 1, False
        more.update(max_new=max_new, eos_ends=eos_ends)
        batch = [rig.add(prompt, **more) for _ in range(copies)]  # type: ignore[arg-type]
        held = rig.scheduler.sizes().held
        result = rig.submit(*batch)
        accepted = result == Accepted(count=copies)
        assert accepted or isinstance(result, Rejected)
        assert rig.scheduler.sizes().held == held + (copies if accepted else 0)
        if not accepted:
            for request in batch:
                rig.table.free(request.row)
                del rig.by_row[request.row]
                rig.requests.remove(request)
        return result

    def freeze(self, *, frozen: bool) -> None:
        if self.stored is None:
            self.rig.permit(forward=not frozen)
        else:
            self.stored.forward = not frozen

    def clear(self) -> bool:
        scheduler = self.rig.scheduler
        may = scheduler.can_clear_cache()
        assert scheduler.clear_cache() == may
        if may:
            assert scheduler.empty_lcm_blocks() == scheduler.num_usable_pages
        return may

    def end_transfer(self, row: int, *, ok: bool) -> None:
        state = self.rig.scheduler.life.of(row)
        self.seen.note(f"transfer {'done' if ok else 'failed'} {state.name}")
        self.peer.end(row, ok=ok)

    def end_storage(self, op_id: int, fails: int, *, cancel: bool) -> None:
        """`fails`: a bit for each key, in turn."""
        assert self.stored is not None
        if cancel and op_id in self.given_up:
            self.stored.executor.cancel(op_id)
            self.seen.note("storage operations cancelled")
        else:
            verb = self.stored.executor.open[op_id].verb.value
            self.stored.end(op_id, fails=lambda at: bool(fails >> at % 4 & 1))
            done = self.stored.executor.completed[-1]
            self.seen.note(f"{verb} ok" if all(done.outcomes) else f"{verb} failed")

    def repeat_storage(self, which: int) -> None:
        """A completion comes once more."""
        if self.told and self.stored is not None:
            tick = StorageTick(
                forward=self.stored.forward,
                storage=self.stored.forward,
                now_s=self.stored.executor.now_s,
                completed=(self.told[which % len(self.told)],),
                cancelled=(10**6,),
            )
            self.rig.scheduler.advance_head(HeadFacts(tick=tick))

    # ---- the rules --------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold between any two calls."""
        rig = self.rig
        rig.check_tokens()
        rig._drain()
        assert rig.scheduler.drain_kv_events() == ()
        rig.check_events()
        rig.audit()
        assert rig.scheduler.pool.fits([0] * rig.scheduler.pool.groups), "a promise that cannot be kept"
        tables = rig.scheduler.residents.state.groups
        assert list(rig.scheduler.pool.contents().promised) == [int(part.owed.sum()) for part in tables]
        self._check_forest()
        tier = rig.scheduler.tier
        if isinstance(tier, HostTier):
            assert tier.host.pool.fits([0] * tier.host.pool.groups)
            for group, block in self._host_in_use():
                assert tier.host.pool.references(group, block), "a host block in use is not pinned"
            for group, block in self._device_in_use():
                assert rig.scheduler.pool.references(group, block), "a device block under a copy is not pinned"

    def _check_forest(self) -> None:
        """Where nothing keeps a block but its age, none is found without what it extends."""
        cache, config = self.rig.scheduler.cache, self.rig.config
        if isinstance(cache, PrefixIndex) and not config.host_parents and [s.kind for s in config.specs] == ["full"]:
            entries = cache.indexes[0].state.entries
            roots = {root_name(salt=salt) for salt in (b"", b"salt")}
            assert {parent for _, parent, _ in entries.values()} <= roots | set(entries)

    def _host_in_use(self) -> Iterator[tuple[int, int]]:
        for one in self.rig.host.pending:
            if isinstance(one.op, WriteBackOp | LoadBackOp):
                yield from ((one.op.group, block) for block in one.op.host_blocks)
            elif isinstance(one.op, RestoreOp):
                yield from ((page.group, block) for page in one.op.pages for block in page.host_blocks)
        if self.stored is not None:
            for op in self.stored.executor.open.values():
                yield from ((group_of(key), block) for key, block in zip(op.keys, op.host_blocks, strict=False))

    def _device_in_use(self) -> Iterator[tuple[int, int]]:
        for one in self.rig.host.pending:
            op = one.op
            if isinstance(op, LoadBackOp) or (isinstance(op, WriteBackOp) and not op.stream_ordered):
                yield from ((op.group, block) for block in op.device_blocks)
            elif isinstance(op, RestoreOp):
                yield from ((page.group, block) for page in op.pages for block in page.device_blocks)
                yield from ((part.group, block) for part in op.tail for block in part.blocks)
        for transfer in self.peer.open.values():
            yield from ((part.group, block) for part in transfer.stream.pages for block in part.blocks)

    def let_go(self) -> None:
        """Nothing is held back any more."""
        self.freeze(frozen=False)
        self.rig.host.held = set()
        self.peer.held = False
        if self.stored is not None:
            self.stored.served, self.stored.executor.pressure = True, 0.0

    def check_end(self) -> None:
        """Every request has ended, as it should, and nothing is left in any tier."""
        rig = self.rig
        for request in rig.requests:
            self._check_ended(request)
        if self.stored is not None:
            self.stored.settle()
        rig.check_idle()
        tier = rig.scheduler.tier
        assert not self.peer.open
        assert not rig.scheduler.images.held
        if isinstance(tier, HostTier):
            assert not tier.open
            assert tier.host.pool.empty == tier.host.pool.usable
        if self.stored is not None:
            assert not rig.scheduler.storage.pins()

    def _check_ended(self, request: Request) -> None:
        assert request.retired
        assert request.finish is not Finish.RUNNING
        assert request.decodes <= request.max_new - 1
        computes = self.rig.config.role is not Role.DECODE
        if computes and request.finish is not Finish.ABORT and request.prompt_from >= 0:
            assert set(range(max(0, request.prompt_from - 1), len(request.prompt))) <= request.computed


def node(config: SchedulerConfig, policy: SchedulingPolicy, seen: Seen) -> Node:
    rig = build(config, policy=policy)
    rig.audited = False
    stored = None
    if config.storage:
        executor = ScriptedStorage()
        stored = StoredRig(rig=rig, executor=executor, l3=AgreedStorage(mesh=SoloMesh(), workers=executor))
    return Node(rig, ToyPeer(rig), stored, seen)
