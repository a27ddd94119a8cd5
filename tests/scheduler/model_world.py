"""Random lives of requests: actions on one scheduler, or on two that must do the same (SP-1)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import attrs
from model_choices import ACTIONS, IMAGES, KINDS, SETUP, STEMS, config_of, policy_of
from model_node import Node, node
from model_seen import Seen
from scheduler_rig import Request, described

from tokenspeed.plane.plan import ExecutionPlan
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

    @property
    def first(self) -> Node:
        return self.nodes[0]

    def submit(self, *, stem: int, keep: int, tail: tuple[int, ...], copies: int, media: int, **more: object) -> None:
        prompt = [*STEMS[stem][:keep], *tail]
        items = tuple(item for item in IMAGES[media] if item.first + item.tokens <= len(prompt))
        results = [one.submit(prompt, copies=copies, media=items, **more) for one in self.nodes]
        assert all(result == results[0] for result in results)

    def abort(self, *, which: int, rare: bool) -> None:
        for one in self.nodes:
            live = [request for request in one.rig.requests if not request.retired]
            if rare:
                live.sort(key=lambda request: RARE.index(one.rig.scheduler.life.of(request.row)))
                live = live[:2]
            if live:
                self._abort(one, live[which % len(live)])

    def _abort(self, one: Node, request: Request) -> None:
        one.seen.aborted(one.rig.scheduler.life.of(request.row))
        one.rig.abort(request)

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
        for one in self.nodes:
            one.freeze(frozen=frozen)

    def withhold(self, *, kind: int, held: bool) -> None:
        """Acknowledgments of one kind do not come for a while."""
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
            kinds = {one.op.op_id: type(one.op) for one in one.rig.host.pending}
            names = ("write_backs", "load_backs", "snapshots", "restores")
            wrong = {name: (number,) for name, kind in zip(names, KINDS, strict=True) if kinds.get(number) is not kind}
            one.rig.scheduler.advance_head(HeadFacts(acks=CacheAcks(**wrong)))

    def storage_serves(self, *, served: bool) -> None:
        for one in self.nodes:
            if one.stored is not None:
                one.stored.served = served

    def storage_ends(self, *, which: int, fails: int, cancel: bool) -> None:
        for one in self.nodes:
            if one.stored is not None and one.stored.executor.open:
                ids = sorted(one.stored.executor.open)
                one.end_storage(ids[which % len(ids)], fails, cancel=cancel)

    def storage_repeats(self, *, which: int) -> None:
        for one in self.nodes:
            one.repeat_storage(which)

    def storage_lags(self, *, seconds: float, pressure: float) -> None:
        for one in self.nodes:
            if one.stored is not None:
                one.stored.executor.now_s += seconds
                one.stored.executor.pressure = pressure

    def transfers_hang(self, *, held: bool) -> None:
        for one in self.nodes:
            one.peer.held = held

    def transfer_ends(self, *, which: int, ok: bool) -> None:
        for one in self.nodes:
            rows = list(one.peer.open)
            if rows:
                one.end_transfer(rows[which % len(rows)], ok=ok)

    def lull(self, *, clear: bool) -> None:
        """Nothing is held back for a while, until all requests have ended."""
        self.calm()
        if clear:
            self.clear()

    # ---- between and behind the actions -------------------------------------------------------------

    def check(self) -> None:
        self.first.check()
        self.seen.step(self.first.rig)

    def calm(self) -> None:
        """Everything that was held back comes, and everything must end."""
        self.frozen = False
        for one in self.nodes:
            one.calm()
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
    return World(nodes, seen, trace)


def run_trace(seed: int, *, steps: int, seen: Seen, **fixed: object) -> str:
    """A life drawn from `seed`, to its idle end; returns a digest of its plans. `fixed`: of `SETUP`, and `role`."""
    dice = random.Random(seed)
    chosen = {name: dice.choice(values) for name, values in SETUP.items()}
    role = dice.choice((Role.PLAIN, Role.PLAIN, Role.PLAIN, Role.PREFILL, Role.DECODE))
    chosen.update(fixed)
    lived = world(Role(chosen.pop("role", role)), chosen, seen, trace=hashlib.sha256())
    names = list(ACTIONS)
    weights = [ACTIONS[name][0] for name in names]
    for _ in range(steps):
        (name,) = dice.choices(names, weights)
        if name == "submit" and lived.first.rig.scheduler.sizes().held > 11:
            name = "rounds"
        arguments = {key: dice.choice(values) for key, values in ACTIONS[name][1].items()}
        getattr(lived, name)(**arguments)
        lived.check()
    lived.finish()
    assert lived.trace is not None
    return lived.trace.hexdigest()
