"""Random lives of requests: actions on one scheduler, or on two that must do the same (SP-1)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from types import MappingProxyType

import attrs
from model_choices import ACTIONS, CHAINS, IMAGES, KINDS, SETUP, STEMS, Choices, config_of, policy_of
from model_node import Node, node
from model_seen import Seen
from scheduler_rig import Request, described
from toy_storage import StoredRig

from tokenspeed.plane.plan import ExecutionPlan, RestoreOp, SnapshotOp, StorageVerb
from tokenspeed.plane.results import CacheAcks, HeadFacts
from tokenspeed.scheduler.config import Role
from tokenspeed.scheduler.states import State

RARE = (
    State.RESTORING,
    State.DISCARDING,
    State.YIELDING,
    State.FENCED,
    State.SUSPENDED,
    State.IMAGING,
    State.HANDOFF,
    State.PREFILL_DONE,
    State.FINISHING,
    State.REMOTE_RECEIVE,
    State.ENDED,
    State.DRAINING,
    State.PREPARING,
    State.DECODING,
    State.PREFILLING,
    State.WAITING,
)
"""States in which an abort is seldom, the seldomest first."""


@attrs.define(eq=False)
class World:
    """Every method but the last ones is an action of `model_choices.ACTIONS`."""

    nodes: tuple[Node, ...]
    seen: Seen
    trace: hashlib._Hash | None = None
    frozen: bool = False
    patience: int = 0
    """Steps until nothing is held back any more; else one that is never revoked would end all life."""
    busy: int = 0
    """Steps since the last lull."""

    @property
    def first(self) -> Node:
        return self.nodes[0]

    def submit(self, *, stem: int, keep: int, tail: tuple[int, ...], copies: int, media: int, **more: object) -> None:
        prompt = [*STEMS[stem][:keep], *tail]
        items = tuple(item for item in IMAGES[media] if item.first + item.tokens <= len(prompt))
        results = [one.submit(prompt, copies=copies, media=items, **more) for one in self.nodes]
        assert all(result == results[0] for result in results)

    def abort(self, *, which: int, rare: bool, times: int) -> None:
        for one in self.nodes:
            live = [request for request in one.rig.requests if not request.retired]
            if rare:
                live.sort(key=lambda request: RARE.index(one.rig.scheduler.life.of(request.row)))
                live = live[:2]
            if live:
                self._abort(one, live[which % len(live)], times)

    def _abort(self, one: Node, request: Request, times: int) -> None:
        """It may be told more than once."""
        for _ in range(times):
            one.seen.aborted(one.rig.scheduler.life.of(request.row))
            one.rig.abort(request)

    def abort_when(self, *, state: State, patience: int, times: int) -> None:
        """A request in a rare state, else the first in `state`, as soon as there is one, held there if need be."""
        self._hold_for(10)
        for one in self.nodes:
            one.rig.host.held |= {State.IMAGING: {SnapshotOp}, State.RESTORING: {RestoreOp}}.get(state, set())
            one.peer.held |= state is State.HANDOFF
            if one.stored is not None and state is State.PREPARING:
                one.stored.served = False
        life = self.first.rig.scheduler.life
        if state is State.PREPARING:
            self.rounds(count=1)
        for _ in range(patience):
            rows = next((life.rows(seldom) for seldom in (*RARE[:6], state) if life.count(seldom)), ())
            if rows:
                for one in self.nodes:
                    self._abort(one, one.rig.by_row[rows[0]], times)
                return
            self.rounds(count=1)

    def rounds(self, *, count: int) -> None:
        for _ in range(count):
            self._same([one.round() for one in self.nodes])

    def plan_ahead(self) -> None:
        """A slow device: the loop is a forward ahead, and stays so for a moment; only at depth 1."""
        if self.first.rig.depth and len(self.first.rig.queue) < 2:
            self._same([one.plan() for one in self.nodes])

    def land_one(self) -> None:
        for one in self.nodes:
            one.rig.land(down_to=max(0, len(one.rig.queue) - 1))

    def clear(self) -> None:
        done = [one.clear() for one in self.nodes]
        assert all(one == done[0] for one in done)
        self.seen.note("cache clears", done[0])

    def freeze(self, *, frozen: bool) -> None:
        self.frozen = frozen
        self._hold_for(6)
        for one in self.nodes:
            one.freeze(frozen=frozen)

    def withhold(self, *, kind: int, held: bool) -> None:
        """Acknowledgments of one kind do not come for a while."""
        self._hold_for(10)
        for one in self.nodes:
            (one.rig.host.held.add if held else one.rig.host.held.discard)(KINDS[kind])

    def acknowledge_one(self, *, which: int, times: int) -> None:
        """Out of order, and twice."""
        for one in self.nodes:
            host = one.rig.host
            if host.pending:
                acks = host.end([host.pending[which % len(host.pending)].op.op_id])
                for _ in range(times):
                    one.rig.scheduler.advance_head(HeadFacts(acks=acks))

    def acknowledge_unknown(self, *, number: int) -> None:
        """Operations that are not open, or of another kind; nothing may happen."""
        for one in self.nodes:
            pending = one.rig.host.pending
            kinds = {each.op.op_id: type(each.op) for each in pending}
            op_id = pending[number % len(pending)].op.op_id if pending and number < 20 else number
            names = ("write_backs", "load_backs", "snapshots", "restores")
            wrong = {name: (op_id,) for name, kind in zip(names, KINDS, strict=True) if kinds.get(op_id) is not kind}
            one.rig.scheduler.advance_head(HeadFacts(acks=CacheAcks(**wrong)))

    def storage_serves(self, *, served: bool) -> None:
        self._hold_for(10)
        for one in self.nodes:
            if one.stored is not None:
                one.stored.served = served

    def storage_ends(self, *, which: int, fails: int, cancel: bool) -> None:
        """A query, and the fetch that follows it, or what else is open."""
        self.storage_serves(served=False)
        for _ in range(3):
            if self.first.stored is not None and not self.first.stored.executor.open:
                self.rounds(count=1)
        for _ in range(2):
            for one in self.nodes:
                if one.stored is not None and one.stored.executor.open:
                    self._end_one(one, one.stored, which, fails, cancel=cancel)
            self.rounds(count=1)

    def _end_one(self, one: Node, stored: StoredRig, which: int, fails: int, *, cancel: bool) -> None:
        ops = stored.executor.open
        ids = sorted(op_id for op_id, op in ops.items() if op.verb is StorageVerb.GET) or sorted(ops)
        chosen = ids[which % len(ids)]
        if ops[chosen].verb is StorageVerb.QUERY and which % 2:
            fails = 0
        one.end_storage(chosen, fails, cancel=cancel)

    def storage_repeats(self, *, which: int) -> None:
        for one in self.nodes:
            one.repeat_storage(which)

    def storage_lags(self, *, seconds: float, pressure: float) -> None:
        for one in self.nodes:
            if one.stored is not None:
                one.stored.executor.now_s += seconds
                one.stored.executor.pressure = pressure

    def transfers_hang(self, *, held: bool) -> None:
        self._hold_for(10)
        for one in self.nodes:
            one.peer.held = held

    def transfer_ends(self, *, which: int, ok: bool) -> None:
        self.transfers_hang(held=True)
        for _ in range(3):
            if not self.first.peer.open:
                self.rounds(count=1)
        for one in self.nodes:
            rows = sorted(one.peer.open, key=lambda row: one.rig.scheduler.life.of(row) is not State.FENCED)
            if rows:
                one.end_transfer(rows[which % len(rows)], ok=ok)

    def lull(self, *, clear: bool) -> None:
        """Nothing is held back for a while, until all requests have ended."""
        if self.busy > 20:
            self.calm()
            if clear:
                self.clear()

    def can(self, action: str) -> bool:
        """Whether there is something that the action can be about."""
        first, config = self.first, self.first.rig.config
        match action.split("_", maxsplit=1)[0]:
            case "storage":
                return first.stored is not None
            case "transfer" | "transfers":
                return config.role is not Role.PLAIN
            case "withhold" | "acknowledge":
                return config.host_parents > 0
            case "plan":
                return config.overlap_schedule_depth > 0
            case "submit":
                return first.rig.scheduler.sizes().held < 12
            case _:
                return True

    # ---- between and behind the actions -------------------------------------------------------------

    def check(self) -> None:
        self.first.check()
        self.seen.step(self.first.rig)
        self.busy += 1
        self.patience -= 1
        if not self.patience:
            self._let_go()

    def calm(self) -> None:
        """Everything that was held back comes, and everything must end."""
        self._let_go()
        self.busy = 0
        for one in self.nodes:
            one.rig.host.delay = 0
        for _ in range(3000):
            if not self.first.rig.scheduler.sizes().held:
                break
            self._same([one.round() for one in self.nodes])
        for one in self.nodes:
            assert not one.rig.scheduler.sizes().held, one.rig.scheduler.sizes()

    def finish(self) -> None:
        self.calm()
        self.first.check()
        for one in self.nodes:
            one.check_end()

    def _hold_for(self, steps: int) -> None:
        if self.patience <= 0:
            self.patience = steps

    def _let_go(self) -> None:
        self.frozen, self.patience = False, 0
        for one in self.nodes:
            one.let_go()

    def _same(self, plans: list[ExecutionPlan]) -> None:
        if self.frozen:
            assert all(plan.batch is None for plan in plans)
        if len(plans) > 1 or self.trace is not None:
            values = [described(plan) for plan in plans]
            assert all(value == values[0] for value in values)
            if self.trace is not None:
                self.trace.update(repr(values[0]).encode())


def world(role: Role, chosen: Mapping[str, object], seen: Seen, *, trace: hashlib._Hash | None = None) -> World:
    """A scheduler as `chosen` from `SETUP` says, and a mirror of it if that says so."""
    config, policy = config_of(role, chosen), policy_of(int(str(chosen["policy"])))
    mirrors = [node(config, policy, Seen())] if chosen["mirrored"] else []
    nodes = (node(config, policy, seen), *mirrors)
    for one in nodes:
        one.rig.host.delay = int(str(chosen["delay"]))
        one.peer.delay = one.rig.host.delay
    lived = World(nodes, seen, trace)
    if config.storage:
        # Something is stored from the beginning.
        for stem in range(len(STEMS)):
            lived.submit(stem=stem, keep=20, tail=(0,), copies=1, media=0, max_new=1, eos_ends=False)
        lived.calm()
        lived.clear()
        for one in nodes:
            one.rig.host.delay = one.peer.delay
    return lived


IMAGED: Choices = MappingProxyType(
    {"prefix": (True,), "chain": CHAINS[:2], "host": (40,), "images": (1, 2), "storage": (False,)}
)
STORED: Choices = MappingProxyType({"prefix": (True,), "host": (6, 15, 40), "storage": (True,)})
KINDS_OF_LIFE: tuple[tuple[Role, Choices], ...] = (
    (Role.PLAIN, MappingProxyType({})),
    (Role.PLAIN, IMAGED),
    (Role.PLAIN, STORED),
    (Role.DECODE, MappingProxyType({})),
    (Role.PREFILL, MappingProxyType({})),
)
"""Roles, and what is left of `SETUP`, so that each tier has its lives."""


def run_trace(seed: int, *, steps: int, seen: Seen, **fixed: object) -> str:
    """A life drawn from `seed`, to its idle end; returns a digest of its plans. `fixed`: of `SETUP`, and `role`."""
    dice = random.Random(seed)
    role, bias = KINDS_OF_LIFE[seed % len(KINDS_OF_LIFE)]
    chosen = {name: dice.choice(bias.get(name, values)) for name, values in SETUP.items()}
    chosen.update(fixed)
    lived = world(Role(chosen.pop("role", role)), chosen, seen, trace=hashlib.sha256())
    names = list(ACTIONS)
    weights = [ACTIONS[name][0] for name in names]
    for _ in range(steps):
        (name,) = dice.choices(names, weights)
        arguments = {key: dice.choice(values) for key, values in ACTIONS[name][1].items()}
        if lived.can(name):
            getattr(lived, name)(**arguments)
        lived.rounds(count=dice.choice((0, 0, 1, 2)))
        lived.check()
    lived.finish()
    assert lived.trace is not None
    return lived.trace.hexdigest()
