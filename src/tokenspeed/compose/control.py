"""The control plane's wiring. Knows specs and ports; imports no torch and no device class.

Replace a part by handing it in: ``ControlContainer(settings=…, specs=…, plane=…, frontend=…,
kv_sink=mine)``. Callers other than tests use `compose.engine.rank_engine`.
"""

from __future__ import annotations

from typing import Self

from dependency_injector import containers, providers

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.compose.configuration import eos_mask, fills_eagerly, scheduler_config
from tokenspeed.compose.parts import check_wiring
from tokenspeed.compose.typed import given, one, pick, read, ref
from tokenspeed.control.batch_log import BatchLog
from tokenspeed.control.cache_ops import CacheOps
from tokenspeed.control.control_ops import ControlOps
from tokenspeed.control.device_ops import DeviceOps
from tokenspeed.control.epd import Epd, NoEncoder
from tokenspeed.control.eplb import Eplb, NoExperts
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.gate import DpStep, Gate
from tokenspeed.control.grammar import GrammarQueue, grammar_queue
from tokenspeed.control.history import History, NoHistory
from tokenspeed.control.ingress import Ingress
from tokenspeed.control.kv_events import KvEvents, NoSink
from tokenspeed.control.l3 import L3, NoStorage
from tokenspeed.control.load import Load
from tokenspeed.control.outbox import Outbox
from tokenspeed.control.output import Output
from tokenspeed.control.pd import NoPeer, Pd
from tokenspeed.control.pipeline import OneStage, Pipeline
from tokenspeed.control.profiling import Profiling
from tokenspeed.control.relay import Relay, voice_of
from tokenspeed.control.request_stats import RequestStats
from tokenspeed.control.state_dump import StateDump
from tokenspeed.control.wakeup import MonotonicClock, ThreadWakeup, wall_of
from tokenspeed.plane.grammar import GrammarCompiler, GrammarMatchers, NoCompiler, NoMatchers
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
from tokenspeed.scheduler.policy import AgedPriority, Fcfs, LongestPrefixMatch
from tokenspeed.scheduler.states import State
from tokenspeed.settings.model import Settings
from tokenspeed.telemetry.meters import NullMeter

STATE_NAMES = tuple(state.name.lower() for state in State)


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
    table: providers.Provider[RequestTable] = one(
        request_table,
        slots=read(specs, lambda device: device.request_slots),
        max_len=read(specs, lambda device: device.max_model_len),
    )
    policy: providers.Provider[SchedulingPolicy] = pick(
        read(settings, lambda tree: tree.scheduler.policy.value),
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
        grammar_queue,
        table=ref(table),
        compiler=ref(compiler),
        matchers=ref(matchers),
        mesh=ref(mesh),
        meter=ref(meter),
        clock=ref(clock),
        eager=read(settings, fills_eagerly),
    )
    epd: providers.Provider[Epd] = one(NoEncoder)
    eplb: providers.Provider[Eplb] = one(NoExperts)
    history: providers.Provider[History] = one(NoHistory)
    pipeline: providers.Provider[Pipeline] = one(OneStage)
    request_stats: providers.Provider[RequestStats] = one(
        RequestStats,
        table=ref(table),
        meter=ref(meter),
        lines=read(settings, lambda tree: tree.log.requests),
        tracer=ref(tracer),
        wall_s=ref(one(wall_of, ref(clock))),
    )
    state_dump: providers.Provider[StateDump] = one(
        StateDump, table=ref(table), scheduler=ref(scheduler), names=STATE_NAMES
    )

    loop: providers.Provider[EventLoop] = one(
        EventLoop,
        depth=read(settings, lambda tree: tree.in_flight_depth),
        table=ref(table),
        scheduler=ref(scheduler),
        plane=ref(plane),
        frontend=ref(one(voice_of, ref(mesh), ref(frontend))),
        wakeup=ref(wakeup),
        clock=ref(clock),
        relay=ref(one(Relay, mesh=ref(mesh))),
        control_ops=ref(
            one(
                ControlOps,
                max_buffered=read(settings, lambda tree: tree.scheduler.max_waiting),
                state_dump=ref(state_dump),
            )
        ),
        device_ops=ref(one(DeviceOps, mesh=ref(mesh))),
        profiling=ref(one(Profiling)),
        ingress=ref(
            one(
                Ingress,
                specs=ref(specs),
                table=ref(table),
                max_waiting=read(settings, lambda tree: tree.scheduler.max_waiting),
                grammar_refusal=read(grammar, lambda queue: queue.refuses),
            )
        ),
        grammar=ref(grammar),
        epd=ref(epd),
        gate=ref(one(Gate, mesh=ref(mesh))),
        l3=ref(l3),
        cache_ops=ref(one(CacheOps, mesh=ref(mesh))),
        dp_step=ref(one(DpStep, mesh=ref(mesh))),
        history=ref(history),
        pipeline=ref(pipeline),
        output=ref(
            one(Output, table=ref(table), is_eos=read(specs, eos_mask), outbox=ref(one(Outbox, table=ref(table))))
        ),
        pd=ref(pd),
        eplb=ref(eplb),
        kv_events=ref(one(KvEvents, sink=ref(kv_sink))),
        load=ref(one(Load)),
        meter=ref(meter),
        batch_log=ref(one(BatchLog, interval_s=read(settings, lambda tree: tree.log.interval_s))),
        request_stats=ref(request_stats),
        state_dump=ref(state_dump),
    )
