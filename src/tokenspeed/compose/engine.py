"""One rank: build the device side, take the build apart, put the control plane over it.

The only module that opens the device side. `rank_engine` is what launcher, Python API and programs
that assemble their own engine use; what it opens it closes in exact reverse order, also when a step
of the build fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MappingProxyType
from typing import TypeAlias, cast

import attrs
from dependency_injector import containers, providers

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress, Progress
from tokenspeed.checkpoint.sources import ResolvedModel, resolve_model
from tokenspeed.collective.solo import SoloMesh
from tokenspeed.compose.control import ControlContainer
from tokenspeed.compose.facts import engine_info
from tokenspeed.compose.grammars import compile_pool, serves_grammars, vocabulary_of
from tokenspeed.compose.parts import check_part, check_parts, misfit
from tokenspeed.compose.storage import StorageNeeds, storage_workers
from tokenspeed.compose.typed import given, one, ref
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.l3 import AgreedStorage
from tokenspeed.control.wakeup import MonotonicClock, ThreadWakeup
from tokenspeed.device.build import DeviceBuild, build_device_side
from tokenspeed.device.control_guard import control_plane_guard
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.gc_hooks import AutomaticCollection, GcHooks
from tokenspeed.device.guards import EnterServing, SyncDebug, sync_debug
from tokenspeed.device.jit_monitor import jit_monitor
from tokenspeed.device.jit_sources import JitSources, open_sources
from tokenspeed.device.parts import DeviceParts, ModelFactory, SamplerFactory
from tokenspeed.device.sampling.base import Sampler
from tokenspeed.device.sampling.checked import CheckedSampler
from tokenspeed.device.specs_of import vocabulary_of as vocabulary_size
from tokenspeed.device.survey import survey
from tokenspeed.device.weights.origin import checkpoint_at
from tokenspeed.errors import SettingsError
from tokenspeed.grammar.matchers import Matchers
from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.ports import Clock, FrontendLink, Mesh, Meter, Wakeup
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.plane.storage import StorageBackend
from tokenspeed.settings.model import Backend, KvEventSettings, Settings
from tokenspeed.settings.refusals import refuse
from tokenspeed.telemetry.meters import NullMeter
from tokenspeed.telemetry.tracing import open_tracer
from tokenspeed.wire.kv_events import EventFormat, KvEventPublisher, open_publisher

Connect: TypeAlias = Callable[[EngineInfo, Wakeup], FrontendLink]
"""Makes the engine's end of the frontend wire; called once, when the device side is complete."""

DEVICE_TYPES: Mapping[Backend, str] = MappingProxyType(
    {Backend.CPU: "cpu", Backend.SIMULATED: "cpu", Backend.CUDA: "cuda"}
)
"""Where the tensors of a backend live, in torch's words."""

SWITCH_INTERVAL_S = 0.0005
"""How long the forward thread's Python may keep the interpreter from a round, in a process of ours."""


class EngineContainer(containers.DeclarativeContainer):
    """The root: its one product is the device side, built once, from settings and a checkpoint."""

    settings: providers.Provider[Settings] = given(Settings)
    checkpoint: providers.Provider[Checkpoint] = given(Checkpoint)
    device_parts: providers.Provider[DeviceParts] = given(DeviceParts)
    progress: providers.Provider[Progress] = given(object)
    device_build: providers.Provider[DeviceBuild] = one(
        build_device_side, ref(settings), ref(checkpoint), ref(device_parts), ref(progress)
    )


@attrs.frozen(kw_only=True, eq=False)
class RankEngine:
    """A built rank. `run` on its control thread; `stop` from any thread."""

    specs: DeviceSpecs
    info: EngineInfo
    loop: EventLoop
    serving: EnterServing
    jit_sources: JitSources
    device_type: str

    def enter_serving(self) -> None:
        """Start-up and handshake are over (SS-11). Only for a process of the launcher: it is process-wide."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.jit_sources.catch_up()
        self.serving.enter()

    def run(self) -> None:
        """Rounds until `stop`, or until the frontend is gone; raises what broke an invariant.

        The calling thread may touch no tensor of the device meanwhile (DP-19).
        """
        with control_plane_guard(os.environ, device_type=self.device_type):
            self.loop.run()

    def stop(self) -> None:
        self.loop.request_stop()

    def request_dump(self) -> None:
        """Any thread: one line of the log tells what the engine holds."""
        self.loop.request_dump()


@contextmanager
def rank_engine(
    settings: Settings,
    *,
    connect: Connect,
    resolved: ResolvedModel | None = None,
    progress: Progress | None = None,
    own_process: bool = False,
    meter_for: Callable[[EngineInfo], Meter] | None = None,
    **parts: object,
) -> Generator[RankEngine, None, None]:
    """Build one rank; see `compose.parts` for what `parts` may replace.

    Args:
        resolved: the model's files if the caller has fetched them already.
        own_process: the process is the rank's own, so that full garbage collections follow the
            count of forwards; a host program's are left alone.
        meter_for: makes the receiver of metrics once it is known what the engine serves; None: nothing is kept.
    Raises: SettingsError, ModelError, NotSupported: nothing stays open.
    """
    refuse(settings)
    chosen = check_parts(parts)
    watch = progress or NoProgress()
    device_type = DEVICE_TYPES[settings.device.backend]
    jit = jit_monitor()
    sync = sync_debug(device_type=device_type)
    with ExitStack() as lifetime:
        sources = open_sources(jit, device_type=device_type)  # ahead of everything that could compile (DP-73)
        lifetime.callback(sources.close)
        files = resolved or resolve_model(settings.model, watch)
        device_parts = _device_parts(chosen.device, sync=sync, own_process=own_process)
        checkpoint = open_checkpoint(files)
        vocab_size = vocabulary_size(checkpoint)
        matchers = Matchers(vocab_size=vocab_size, token_s=settings.grammar.token_ms / 1e3)
        device_parts = attrs.evolve(device_parts, matchers=matchers)
        root = EngineContainer(settings=settings, checkpoint=checkpoint, device_parts=device_parts, progress=watch)
        build = root.device_build()
        wakeup = cast("Wakeup", chosen.control.get("wakeup") or ThreadWakeup())
        with ExitStack() as unowned:
            unowned.callback(build.handle.close)
            plane = open_data_plane(build.handle, wakeup, sync=sync, jit=jit)
            unowned.pop_all()  # closed by the data plane from here on
        lifetime.callback(plane.close)
        lifetime.callback(plane.shutdown_cache)
        specs, host_cache = build.specs, build.host_cache
        del build, root  # the handle is the data plane's alone from here on (DP-28, DP-32)
        info = engine_info(settings, specs, served_name=files.served_name)
        control = dict(chosen.control)
        if settings.kv_events.endpoint is not None and "kv_sink" not in control:
            control["kv_sink"] = sink = kv_event_sink(settings.kv_events, rank=info.engine_index)
            lifetime.callback(sink.close)
        if meter_for is not None:
            control.setdefault("meter", meter_for(info))
        needs = StorageNeeds(
            settings=settings,
            specs=specs,
            blocks=host_cache.blocks,
            numerics=host_cache.numerics,
            checkpoint=checkpoint,
            checkpoint_at=partial(checkpoint_at, running=checkpoint),
            given=cast("StorageBackend | None", chosen.rank.get("storage")),
        )
        del host_cache
        if needs.wanted and "l3" not in control:
            mesh = cast("Mesh", control.setdefault("mesh", SoloMesh()))
            meter = cast("Meter", control.setdefault("meter", NullMeter()))
            clock = cast("Clock", control.setdefault("clock", MonotonicClock()))
            workers = storage_workers(needs, clock=clock, meter=meter, wakeup=wakeup)
            lifetime.callback(workers.close)
            control["l3"] = AgreedStorage(mesh=mesh, workers=workers)
        if settings.tracing.endpoint is not None and "tracer" not in control:
            service = f"engine{info.engine_index}"
            control["tracer"] = tracer = open_tracer(settings.tracing, service=service, model=info.model)
            lifetime.callback(tracer.close)
        if serves_grammars(settings):
            known = partial(vocabulary_of, checkpoint, size=vocab_size)
            control["matchers"] = matchers
            control["compiler"] = compiler = compile_pool(settings.grammar, matchers, wakeup, known)
            lifetime.callback(compiler.close)
        link = connect(info, wakeup)
        lifetime.callback(link.close)
        box = ControlContainer(
            settings=settings,
            specs=specs,
            plane=plane,
            frontend=link,
            **{**control, "wakeup": wakeup},
        )
        yield RankEngine(
            specs=specs,
            info=info,
            loop=box.loop(),
            serving=EnterServing(sync_debug=sync, jit=jit),
            jit_sources=sources,
            device_type=device_type,
        )


def kv_event_sink(events: KvEventSettings, *, rank: int) -> KvEventPublisher:
    """The publisher that the settings describe. Raises: SettingsError: an address cannot be bound."""
    if events.endpoint is None:
        raise SettingsError("kv_events.endpoint: missing")
    return open_publisher(
        events.endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.topic,
        event_format=EventFormat(events.format.value),
        rank=rank,
        keep=events.keep_batches,
    )


def _device_parts(given_parts: Mapping[str, object], *, sync: SyncDebug, own_process: bool) -> DeviceParts:
    """Raises: SettingsError: a part does not fit its protocol."""
    protocols: dict[str, type] = {"model": ModelFactory, "sampler": SamplerFactory}
    for name, value in given_parts.items():
        check_part(name, value, protocols[name])
    sampler = cast("SamplerFactory | None", given_parts.get("sampler"))
    return DeviceParts(
        model=cast("ModelFactory | None", given_parts.get("model")),
        sampler=None if sampler is None else _checked(sampler),
        rounds=GcHooks() if own_process else AutomaticCollection(),
        watch=sync.watching,
    )


def _checked(make: SamplerFactory) -> SamplerFactory:
    @wraps(make, assigned=(), updated=())  # the build reads from its parameters whether it takes processors
    def checked(**arguments: int) -> Sampler:
        made = make(**arguments)
        if fault := misfit(made, Sampler):
            raise SettingsError(f"part 'sampler' makes what does not fit Sampler: {fault}")
        return CheckedSampler(inner=made, samples_on_host=getattr(made, "samples_on_host", False))

    return checked


__all__ = ["Connect", "EngineContainer", "RankEngine", "rank_engine", "survey"]
