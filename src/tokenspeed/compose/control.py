"""The control plane's wiring. Knows specs and ports; imports no torch and no device class.

Replace a part by handing it in: ``ControlContainer(settings=…, specs=…, plane=…, frontend=…,
kv_sink=mine)``. Callers other than tests use `compose.engine.rank_engine`.
"""

from __future__ import annotations

import time
from typing import Self

import numpy as np
from dependency_injector import containers, providers

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.compose.parts import check_wiring
from tokenspeed.compose.typed import given, one, pick, ref
from tokenspeed.control.batch_log import BatchLog
from tokenspeed.control.cache_ops import CacheOps
from tokenspeed.control.control_ops import ControlOps
from tokenspeed.control.device_ops import DeviceOps
from tokenspeed.control.epd import Epd, NoEncoder
from tokenspeed.control.eplb import Eplb, NoExperts
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.gate import DpStep, Gate
from tokenspeed.control.grammar import CompiledGrammars, GrammarQueue, NoGrammar
from tokenspeed.control.history import History, NoHistory
from tokenspeed.control.ingress import Ingress
from tokenspeed.control.kv_events import KvEvents, NoSink
from tokenspeed.control.l3 import L3, NoStorage
from tokenspeed.control.load import Load
from tokenspeed.control.output import Output
from tokenspeed.control.pd import NoPeer, Pd
from tokenspeed.control.pipeline import OneStage, Pipeline
from tokenspeed.control.profiling import Profiling
from tokenspeed.control.relay import Relay, voice_of
from tokenspeed.control.request_stats import RequestStats
from tokenspeed.control.state_dump import StateDump
from tokenspeed.control.wakeup import MonotonicClock, ThreadWakeup
from tokenspeed.errors import SettingsError
from tokenspeed.plane.grammar import GrammarCompiler, GrammarMatchers, NoCompiler, NoMatchers
from tokenspeed.plane.messages import BoolArray
from tokenspeed.plane.ports import (
    Clock,
    DataPlane,
    FrontendLink,
    KvEventSink,
    Mesh,
    Meter,
    Scheduler,
    SchedulingPolicy,
    Wakeup,
)
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.plane.table import RequestTable, request_table
from tokenspeed.plane.traces import NoTracer, Tracer
from tokenspeed.scheduler.build import build_scheduler
from tokenspeed.scheduler.config import Retraction, Role, SchedulerConfig, WritePolicy
from tokenspeed.scheduler.policy import AgedPriority, Fcfs, LongestPrefixMatch
from tokenspeed.scheduler.states import State
from tokenspeed.settings.choices import Backend, Executor, GrammarFill
from tokenspeed.settings.model import Settings
from tokenspeed.telemetry.meters import NullMeter


def depth_of(settings: Settings) -> int:
    """Two switches turn it off (DO-2; pipelines come with their ranks)."""
    return settings.in_flight_depth


def scheduler_config(settings: Settings, specs: DeviceSpecs, sink: KvEventSink, l3: L3, pd: Pd) -> SchedulerConfig:
    """Cache changes are collected only if somebody takes them, and storage is asked only if there is one."""
    return SchedulerConfig(
        kv_events=not isinstance(sink, NoSink),
        storage=not isinstance(l3, NoStorage),
        storage_min_tokens=settings.storage.min_tokens,
        # A look-up and a fetch, each within the executor's limit; this one is for members that are late.
        storage_wait_s=2 * settings.storage.timeout_s,
        role=role_of(pd),
        max_num_seqs=specs.max_num_seqs,
        spare_slots=specs.spare_slots,
        max_batched_tokens=specs.max_batched_tokens,
        chunk_tokens=min(settings.scheduler.chunk_tokens, specs.max_batched_tokens),
        page_tokens=specs.page_tokens,
        num_pages=specs.num_pages,
        max_model_len=specs.max_model_len,
        overlap_schedule_depth=depth_of(settings),
        speculation_width=specs.speculation_width,
        prefix=settings.cache.prefix,
        groups=specs.groups,
        host_parents=specs.host_parents,
        images=specs.images,
        write_policy=WritePolicy(settings.cache.write_policy.value),
        retraction=tuple(Retraction(step.value) for step in settings.scheduler.retraction),
    )


def role_of(pd: Pd) -> Role:
    """Raises: SettingsError: the part names a role that there is not."""
    name = pd.role
    try:
        return Role(name)
    except ValueError as unknown:
        known = ", ".join(role.value for role in Role)
        raise SettingsError(f"part 'pd': {name!r} is not allowed as role; expected one of {known}") from unknown


def table_of(specs: DeviceSpecs) -> RequestTable:
    return request_table(slots=specs.request_slots, max_len=specs.max_model_len)


def eos_mask(specs: DeviceSpecs) -> BoolArray:
    """bool ``[vocab]``, True at the model's EOS ids."""
    mask: BoolArray = np.zeros(specs.vocab_size, dtype=np.bool_)
    mask[[token for token in specs.eos_token_ids if token < specs.vocab_size]] = True
    return mask


def ingress_of(settings: Settings, specs: DeviceSpecs, table: RequestTable, grammar: GrammarQueue) -> Ingress:
    return Ingress(
        specs=specs, table=table, max_waiting=settings.scheduler.max_waiting, grammar_refusal=grammar.refuses
    )


def fills_eagerly(settings: Settings) -> bool:
    """Which path batches take (GR-7, GR-8): without a host node in the forward, the eager one."""
    if settings.grammar.fill is not GrammarFill.AUTO:
        return settings.grammar.fill is GrammarFill.EAGER
    return settings.device.executor is Executor.FUTURES or settings.device.backend is not Backend.CPU


def grammar_of(
    settings: Settings,
    table: RequestTable,
    compiler: GrammarCompiler,
    matchers: GrammarMatchers,
    mesh: Mesh,
    meter: Meter,
    clock: Clock,
) -> GrammarQueue:
    if isinstance(compiler, NoCompiler):
        return NoGrammar()
    return CompiledGrammars(
        table=table,
        compiler=compiler,
        matchers=matchers,
        mesh=mesh,
        meter=meter,
        clock=clock,
        eager=fills_eagerly(settings),
    )


def control_ops_of(settings: Settings, dump: StateDump, clock: Clock) -> ControlOps:
    return ControlOps(max_buffered=settings.scheduler.max_waiting, describe=lambda: dump.describe(now_s=clock.now_s()))


def state_dump_of(table: RequestTable, scheduler: Scheduler) -> StateDump:
    return StateDump(table=table, scheduler=scheduler, names=tuple(state.name.lower() for state in State))


def batch_log_of(settings: Settings) -> BatchLog:
    return BatchLog(interval_s=settings.log.interval_s)


def stats_of(settings: Settings, table: RequestTable, meter: Meter, tracer: Tracer, clock: Clock) -> RequestStats:
    return RequestStats(
        table=table,
        meter=meter,
        lines=settings.log.requests,
        tracer=tracer,
        wall_s=lambda: time.time() - clock.now_s(),
    )


def policy_name(settings: Settings) -> str:
    return settings.scheduler.policy.value


class ControlContainer(containers.DeclarativeContainer):
    """Every component of one rank's control plane; `loop` is the root.

    Raises: SettingsError: a name that is no part, or an object that does not fit its protocol.
    """

    def __new__(cls, **given_parts: object) -> Self:
        check_wiring(given_parts, cls.providers)
        return super().__new__(cls, **given_parts)

    settings: providers.Provider[Settings] = given(Settings)
    specs: providers.Provider[DeviceSpecs] = given(DeviceSpecs)
    plane: providers.Provider[DataPlane] = given(DataPlane)
    frontend: providers.Provider[FrontendLink] = given(FrontendLink)

    clock: providers.Provider[Clock] = one(MonotonicClock)
    wakeup: providers.Provider[Wakeup] = one(ThreadWakeup)
    mesh: providers.Provider[Mesh] = one(SoloMesh)
    meter: providers.Provider[Meter] = one(NullMeter)
    tracer: providers.Provider[Tracer] = one(NoTracer)
    kv_sink: providers.Provider[KvEventSink] = one(NoSink)
    table: providers.Provider[RequestTable] = one(table_of, ref(specs))
    policy: providers.Provider[SchedulingPolicy] = pick(
        one(policy_name, ref(settings)),
        fcfs=ref(one(Fcfs)),
        priority=ref(one(AgedPriority)),
        lpm=ref(one(LongestPrefixMatch)),
    )
    l3: providers.Provider[L3] = one(NoStorage)
    pd: providers.Provider[Pd] = one(NoPeer)
    scheduler: providers.Provider[Scheduler] = one(
        build_scheduler,
        ref(one(scheduler_config, ref(settings), ref(specs), ref(kv_sink), ref(l3), ref(pd))),
        ref(table),
        ref(policy),
    )

    compiler: providers.Provider[GrammarCompiler] = one(NoCompiler)
    matchers: providers.Provider[GrammarMatchers] = one(NoMatchers)
    grammar: providers.Provider[GrammarQueue] = one(
        grammar_of, ref(settings), ref(table), ref(compiler), ref(matchers), ref(mesh), ref(meter), ref(clock)
    )
    epd: providers.Provider[Epd] = one(NoEncoder)
    eplb: providers.Provider[Eplb] = one(NoExperts)
    history: providers.Provider[History] = one(NoHistory)
    pipeline: providers.Provider[Pipeline] = one(OneStage)
    request_stats: providers.Provider[RequestStats] = one(
        stats_of, ref(settings), ref(table), ref(meter), ref(tracer), ref(clock)
    )

    state_dump: providers.Provider[StateDump] = one(state_dump_of, ref(table), ref(scheduler))

    loop: providers.Provider[EventLoop] = one(
        EventLoop,
        depth=ref(one(depth_of, ref(settings))),
        table=ref(table),
        scheduler=ref(scheduler),
        plane=ref(plane),
        frontend=ref(one(voice_of, ref(mesh), ref(frontend))),
        wakeup=ref(wakeup),
        clock=ref(clock),
        relay=ref(one(Relay, mesh=ref(mesh))),
        control_ops=ref(one(control_ops_of, ref(settings), ref(state_dump), ref(clock))),
        device_ops=ref(one(DeviceOps, mesh=ref(mesh))),
        profiling=ref(one(Profiling)),
        ingress=ref(one(ingress_of, ref(settings), ref(specs), ref(table), ref(grammar))),
        grammar=ref(grammar),
        epd=ref(epd),
        gate=ref(one(Gate, mesh=ref(mesh))),
        l3=ref(l3),
        cache_ops=ref(one(CacheOps, mesh=ref(mesh))),
        dp_step=ref(one(DpStep, mesh=ref(mesh))),
        history=ref(history),
        pipeline=ref(pipeline),
        output=ref(one(Output, table=ref(table), is_eos=ref(one(eos_mask, ref(specs))))),
        pd=ref(pd),
        eplb=ref(eplb),
        kv_events=ref(one(KvEvents, sink=ref(kv_sink))),
        load=ref(one(Load)),
        meter=ref(meter),
        batch_log=ref(one(batch_log_of, ref(settings))),
        request_stats=ref(request_stats),
        state_dump=ref(state_dump),
    )
