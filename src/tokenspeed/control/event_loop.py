"""One scheduling round, top to bottom, and the thread that runs rounds for ever.

The round is a sequence of component calls and holds no logic of theirs. Every place where scheduler
state moves is in this file, each with its reason.
"""

from __future__ import annotations

from collections import deque

import attrs
import numpy as np

from tokenspeed.control.batch_log import BatchLog
from tokenspeed.control.cache_ops import CacheOps
from tokenspeed.control.control_ops import ControlOps
from tokenspeed.control.device_ops import STILL_HELD, DeviceOps
from tokenspeed.control.epd import Epd
from tokenspeed.control.eplb import Eplb
from tokenspeed.control.gate import DpStep, Gate
from tokenspeed.control.grammar import GrammarQueue, Settled
from tokenspeed.control.history import History
from tokenspeed.control.ingress import Ingress
from tokenspeed.control.kv_events import KvEvents
from tokenspeed.control.l3 import L3
from tokenspeed.control.load import Load
from tokenspeed.control.output import Output
from tokenspeed.control.pd import Pd
from tokenspeed.control.pipeline import Pipeline
from tokenspeed.control.profiling import Profiling
from tokenspeed.control.relay import Relay
from tokenspeed.control.request_stats import RequestStats
from tokenspeed.control.state_dump import StateDump
from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import Dispatch, ExecutionPlan, ForwardBatch
from tokenspeed.plane.ports import Clock, DataPlane, FrontendLink, Meter, Scheduler, Ticket, Wakeup
from tokenspeed.plane.results import HeadFacts, Rejected, SchedulerEvent
from tokenspeed.plane.routed import Routed
from tokenspeed.plane.table import RequestTable


@attrs.frozen(kw_only=True, eq=False)
class Flight:
    """A dispatched forward that is not committed yet."""

    ticket: Ticket
    batch: ForwardBatch


@attrs.define(eq=False)
class LoopState:
    """Writer: EventLoop. `in_flight` holds at most depth + 1 forwards.

    `ended` and `retired` are rows of this round: requests that ended, rows the scheduler let go.
    """

    in_flight: deque[Flight] = attrs.field(factory=deque[Flight])
    ended: list[int] = attrs.field(factory=list[int])
    retired: list[int] = attrs.field(factory=list[int])
    stop_asked: bool = False
    stopped: bool = False
    funnelled: int = 0


@attrs.frozen(kw_only=True, eq=False)
class EventLoop:
    """The control thread's work. `request_stop` is safe from any thread; all else is the loop's own."""

    depth: int
    table: RequestTable
    scheduler: Scheduler
    plane: DataPlane
    frontend: FrontendLink
    wakeup: Wakeup
    clock: Clock
    relay: Relay
    control_ops: ControlOps
    device_ops: DeviceOps
    profiling: Profiling
    ingress: Ingress
    grammar: GrammarQueue
    epd: Epd
    gate: Gate
    l3: L3
    cache_ops: CacheOps
    dp_step: DpStep
    history: History
    pipeline: Pipeline
    output: Output
    pd: Pd
    eplb: Eplb
    kv_events: KvEvents
    load: Load
    meter: Meter
    batch_log: BatchLog
    request_stats: RequestStats
    state_dump: StateDump
    state: LoopState = attrs.field(factory=LoopState)

    def run(self) -> None:
        """Rounds until a stop; between rounds without progress, sleep until something arrives.

        Raises whatever a round raised: a broken invariant ends the rank (SS-13).
        """
        while not self.state.stopped:
            if not self.round() and not self.state.stopped:
                self._sleep()

    def request_stop(self) -> None:
        """End the loop at the end of a round (SS-12)."""
        self.state.stop_asked = True
        self.wakeup.set()

    def request_dump(self) -> None:
        """Any thread: describe the engine's state in the log at the end of the next round."""
        self.state_dump.ask()
        self.wakeup.set()

    def round(self) -> bool:
        """One scheduling round. Returns whether it made progress, so that another should follow at once."""
        now_s = self.clock.now_s()

        # 1. Receive, admit, gate.
        inbox = self.relay.share(self.frontend.receive(), stop=self.state.stop_asked or self.frontend.gone)
        routed = self.control_ops.route(inbox.messages, now_s=now_s)
        intake = self.ingress.admit(
            routed.requests,
            holds=self.scheduler.holds,
            buffers=self.control_ops.buffers,
            waiting=self._waiting,
        )
        self.output.refuse(routed.refusals + intake.refusals)
        self._submit(self.epd.stage(self.grammar.queue(intake.rows)))
        self._abort(self.ingress.rows_of(routed.aborts), "the client cancelled the request")
        self._abort(self._rows_to_end(routed), routed.abort_why or "the request was aborted")
        self._abort(self._compiling_in_a_drain(), "the engine drains, and does not wait for this request's grammar")
        self._settle(self.grammar.ready())
        self._submit(self.epd.ready())
        self.control_ops.tell(self.profiling.serve(routed.profiles, self.plane))
        operation = self.gate.passes(waiting=self.control_ops.operation_waiting())
        if operation:
            self._operate(now_s)

        # 2. Head: completed cache and storage work, before planning, because admissions may wait for it.
        tick = self.l3.agree(forward=not self.control_ops.frozen)
        facts = HeadFacts(acks=self.cache_ops.poll(self.plane), tick=tick)
        if facts:
            # The scheduler learns what completed and what is permitted; the only head advance.
            self.scheduler.advance_head(facts)

        # 3. and 4. Plan, dispatch, commit.
        events: list[SchedulerEvent] = []
        committed = self._drain_if(self.control_ops.frozen, events)
        plan, dispatched, forwarded = self._plan_and_dispatch(events, now_s)
        self.eplb.note(forwarded=forwarded)
        if forwarded:
            self.plane.note_forwarded()
        self.profiling.note(self.plane, forwarded=dispatched)
        committed += self._commit_down_to(self.depth if dispatched else 0, events)
        events.extend(self.pd.poll())

        # 5. Tail.
        if events:
            # Results and transfers of this round are in before another round plans; the only tail advance.
            self.scheduler.advance(events)
        # One drain a round, behind the last mutation of the scheduler.
        self.kv_events.publish(self.scheduler.drain_kv_events())
        self._release_ended()
        self._send(now_s)
        self.control_ops.resolve(drained=self._drained, empty=self._empty, stored=not self.l3.open)
        for reply in self.control_ops.take_replies():
            self.frontend.reply(reply)
        self.state.stopped = inbox.stop
        return dispatched or committed > 0 or _moved(plan) or self.control_ops.due

    # ---- steps of the round -------------------------------------------------------------------

    def _submit(self, rows: tuple[int, ...]) -> None:
        """The one funnel to the scheduler (IS-5): ordinary admission, ready grammars, landed embeddings."""
        if not rows:
            return
        self.state.funnelled += len(rows)
        self.request_stats.submitted(rows, now_s=self.clock.now_s())
        # New work enters; the batch is taken whole or not at all.
        outcome = self.scheduler.submit(rows)
        if isinstance(outcome, Rejected):
            self.output.reject(rows, outcome.message)
            self.grammar.release(rows)
            for row in rows:
                self.table.free(row)
        else:
            self.pd.started(rows)

    def _abort(self, rows: tuple[int, ...], why: str) -> None:
        """End requests before their time: the client is told now, pages return when forwards landed."""
        if rows:
            self.state.ended.extend(self.output.end(rows, Finish.ABORT, message=why))
            # Those whose grammar still compiles are nobody's; the scheduler does not know them.
            self.state.retired.extend(self.grammar.cancel(rows))
            # The scheduler stops planning them; it retires each once nothing of it is in flight.
            self.scheduler.abort(rows)

    def _settle(self, settled: Settled) -> None:
        """Requests whose grammar is decided: admitted, or ended with the reason (GR-3)."""
        for row, status, why in settled.failed:
            self.state.ended.extend(self.output.end((row,), Finish.ABORT, status=status, message=why))
            self.state.retired.append(row)
        self._submit(settled.rows)

    def _compiling_in_a_drain(self) -> tuple[int, ...]:
        """A drain does not wait for grammars: those requests end (CP-13)."""
        return self.grammar.waiting() if self.control_ops.drains else ()

    def _rows_to_end(self, routed: Routed) -> tuple[int, ...]:
        """Live requests that a message of this round ends without naming each, in order of admission."""
        if routed.abort_ahead < 0 and not routed.prefixes:
            return ()
        ahead = routed.requests[: max(routed.abort_ahead, 0)] if routed.abort_ahead >= 0 else routed.requests
        behind = {request.rid for request in routed.requests[len(ahead) :]}
        every = routed.abort_ahead >= 0
        return tuple(
            row
            for rid, row in self.table.by_rid.items()
            if self.table.output.owned[row] and (rid.startswith(routed.prefixes) or (every and rid not in behind))
        )

    def _operate(self, now_s: float) -> None:
        """What passed the gate: a flush, or the operation at the head of the queue."""
        ops = self.control_ops
        if ops.flush_waiting():
            ops.flush_tried(refusal=self._flush(), now_s=now_s)
        op = ops.take_operation()
        if op is not None:
            refusal = self.device_ops.carry_out(op, self.plane, clear=self._clear_cache, restore=ops.restores())
            self.l3.operated(op, refusal)
            ops.carried_out(op, refusal)

    def _flush(self) -> str:
        """Returns "", or why nothing has changed. Storage goes first: it may refuse (CP-38)."""
        if not self.scheduler.can_clear_cache():
            return STILL_HELD
        return self.l3.clear() or ("" if self._clear_cache() else STILL_HELD)

    def _clear_cache(self) -> bool:
        # Every tier forgets what it holds, unless somebody holds blocks of it; nothing else changes then.
        cleared = self.scheduler.clear_cache()
        if cleared:
            self.plane.flush_cache()
        return cleared

    def _plan_and_dispatch(self, events: list[SchedulerEvent], now_s: float) -> tuple[ExecutionPlan, bool, bool]:
        """Plan a round and queue its device work. Returns the plan, and whether its batch, or any forward, went out.

        Every reason for a dispatch to wait for an uncommitted forward belongs here (DO-10, ER-4).
        """
        # Planning admits, retracts, evicts and drops ended requests; the plan lists what it did.
        plan = self.scheduler.next_execution_plan()
        self.cache_ops.note(plan)
        self._finish_planned_ends(plan)
        self._record(plan, now_s)
        batch = plan.batch
        idle = self.dp_step.idle_forward_due(tokens=0 if batch is None else batch.num_tokens)
        if idle:
            self.plane.idle_forward()
        if batch is not None and self.grammar.needs_commit_first(batch):
            self._commit_down_to(0, events)
        self.l3.submit(plan.storage_ops())
        if not plan.needs_device():
            return plan, False, idle
        ticket = self.plane.execute(plan, self._gather(plan))
        if batch is None:
            return plan, False, idle
        self.state.in_flight.append(Flight(ticket=ticket, batch=batch))
        self.request_stats.dispatched(batch, now_s=self.clock.now_s())
        return plan, True, True

    def _gather(self, plan: ExecutionPlan) -> Dispatch:
        """Per-round inputs of the batch (RA-20)."""
        batch, seats = plan.batch, self.ingress.seats(plan.seated)
        if batch is None:
            return Dispatch(seats=seats)
        return Dispatch(
            seats=seats,
            logprobs=self.output.logprob_plan(batch),
            histories=self.history.seeds(plan),
            grammars=self.grammar.plan(plan),
        )

    def _finish_planned_ends(self, plan: ExecutionPlan) -> None:
        """Tell clients of capacity aborts, and note the rows that the scheduler let go."""
        for abort in plan.aborts:
            self.state.ended.extend(self.output.end((abort.row,), Finish.ABORT, status=503, message=abort.reason))
        self.request_stats.preempted(plan.preempted)
        self.state.retired.extend(plan.retired)

    def _drain_if(self, wanted: bool, events: list[SchedulerEvent]) -> int:
        """A frozen round first commits everything dispatched (RA-16)."""
        return self._commit_down_to(0, events) if wanted else 0

    def _commit_down_to(self, depth: int, events: list[SchedulerEvent]) -> int:
        """Commit the oldest forwards until at most `depth` are in flight; returns how many."""
        count = 0
        while len(self.state.in_flight) > depth:
            flight = self.state.in_flight.popleft()
            result = self.pipeline.adopt_last_stage(self.plane.commit(flight.ticket))
            result = self.grammar.adopt(flight.batch, result)
            landed = self.output.commit(flight.batch, result)
            self.state.ended.extend(landed.finished)
            events.append(landed)
            self.request_stats.committed(flight.batch, now_s=self.clock.now_s())
            self.meter.committed(
                decode_tokens=_decodes(flight.batch) - landed.surplus,
                jit_compiles=result.jit_compiles,
                jit_seconds=result.jit_seconds,
                async_steps=result.async_steps,
                sync_fallback_steps=result.sync_fallback_steps,
            )
            count += 1
        return count

    def _release_ended(self) -> None:
        """Give back device resources of ended requests, behind the forwards that read them (OL-14)."""
        if self.state.ended:
            rows = tuple(self.state.ended)
            self.state.ended.clear()
            self.request_stats.ended(rows, now_s=self.clock.now_s())
            self.grammar.release(rows)
            self.plane.release(rows, tuple(self.table.schedule.slot[list(rows)].tolist()))
        # Behind the release and the statistics, which read the rows.
        for row in self.state.retired:
            self.table.free(row)
        self.state.retired.clear()

    def _send(self, now_s: float) -> None:
        """The round's one message: outputs, and the load of the round's end (OL-12, FW-25)."""
        report = self.load.snapshot(self.scheduler, self.scheduler.sizes(), now_s=now_s)
        due = self.load.due(report, with_output=self.output.has_output, now_s=now_s)
        message = self.output.take(due)
        if message is not None:
            if version := self.control_ops.version_to_tell():
                message = message._replace(weight_version=version)
            self.frontend.send(message)
        if due is not None:
            self.meter.reported(due)
        if self.state_dump.asked:
            self.state_dump.write(in_flight=len(self.state.in_flight), now_s=now_s)

    def _record(self, plan: ExecutionPlan, now_s: float) -> None:
        """One record a round, on the state before dispatch (KM-4)."""
        batch = plan.batch
        if batch is None:
            return
        sizes = self.scheduler.sizes()
        report = self.load.snapshot(self.scheduler, sizes, now_s=now_s)
        tokens, decodes = batch.num_tokens, _decodes(batch)
        self.meter.round(sizes=sizes, load=report, tokens=tokens, prompt_tokens=tokens - decodes)
        self.batch_log.record(
            report,
            decode_tokens=decodes,
            prompt_tokens=tokens - decodes,
            preempted=len(plan.preempted),
            now_s=now_s,
        )

    # ---- questions ----------------------------------------------------------------------------

    def _waiting(self) -> int:
        return self.scheduler.sizes().waiting + len(self.grammar.waiting())

    @property
    def _drained(self) -> bool:
        if not self.control_ops.busy or self.state.in_flight or self.cache_ops.open:
            return False
        return self._empty()

    def _empty(self) -> bool:
        return self.scheduler.sizes().held == 0

    def _sleep(self) -> None:
        """Block until something arrives; quiet seconds pass with a heartbeat and without a round (FW-29)."""
        while True:
            now_s = self.clock.now_s()
            timers = [self.load.next_heartbeat_s()]
            if (timer := self.control_ops.next_timer_s()) is not None:
                timers.append(timer)
            if self.wakeup.wait(max(0.0, min(timers) - now_s)):
                return
            now_s = self.clock.now_s()
            beat = self.load.heartbeat(now_s=now_s)
            if beat is not None:
                message = self.output.take(beat)
                if message is not None:
                    self.frontend.send(message)
                self.meter.reported(beat)
            if timer is not None and now_s >= timer:
                return


def _decodes(batch: ForwardBatch) -> int:
    """Rows that compute one token: all of them, where there are no more tokens than rows."""
    rows = len(batch.rows)
    return rows if batch.num_tokens == rows else int(np.count_nonzero(batch.counts == 1))


def _moved(plan: ExecutionPlan) -> bool:
    """Whether planning itself changed something that the next round can build on."""
    return bool(plan.retired or plan.aborts or plan.preempted)
