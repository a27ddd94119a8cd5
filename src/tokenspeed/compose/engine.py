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
from tokenspeed.compose.control import ControlContainer
from tokenspeed.compose.facts import engine_info
from tokenspeed.compose.grammars import grammar_parts, preloading
from tokenspeed.compose.observers import open_observers
from tokenspeed.compose.parts import check_part, check_parts, misfit
from tokenspeed.compose.storage import StorageNeeds, storage_parts
from tokenspeed.compose.typed import given, one, ref
from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.device.attention_build import HostCacheFacts
from tokenspeed.device.build import DeviceBuild, build_device_side
from tokenspeed.device.control_guard import control_plane_guard
from tokenspeed.device.data_plane import HostDataPlane, open_data_plane
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
from tokenspeed.plane.grammar import GrammarMatchers
from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.ports import DeviceHandle, FrontendLink, Meter, Wakeup
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.plane.storage import StorageBackend
from tokenspeed.settings.model import Backend, Settings
from tokenspeed.settings.refusals import refuse

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
    preload: Callable[[], None]

    def enter_serving(self) -> None:
        """Start-up and handshake are over (SS-11). Only for a process of the launcher: it is process-wide."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.jit_sources.catch_up()
        self.serving.enter()
        self.preload()

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
    wakeup = cast("Wakeup", chosen.control.get("wakeup") or ThreadWakeup())
    device_type = DEVICE_TYPES[settings.device.backend]
    jit, sync = jit_monitor(), sync_debug(device_type=device_type)
    with ExitStack() as lifetime:
        sources = open_sources(jit, device_type=device_type)  # ahead of everything that could compile (DP-73)
        lifetime.callback(sources.close)
        files = resolved or resolve_model(settings.model, watch)
        checkpoint = open_checkpoint(files)
        matchers = Matchers(vocab_size=vocabulary_size(checkpoint), token_s=settings.grammar.token_ms / 1e3)
        device_parts = _device_parts(chosen.device, matchers, sync=sync, own_process=own_process)
        specs, host_cache, plane = _open_plane(
            EngineContainer(settings=settings, checkpoint=checkpoint, device_parts=device_parts, progress=watch),
            lifetime,
            partial(open_data_plane, wakeup=wakeup, sync=sync, jit=jit),
        )
        info = engine_info(settings, specs, served_name=files.served_name)
        observers = open_observers(settings, info, lifetime, replaced=chosen.control, meter_for=meter_for)
        grammars = grammar_parts(settings, checkpoint, matchers, wakeup, lifetime)
        stored = storage_parts(
            StorageNeeds(
                settings=settings,
                specs=specs,
                blocks=host_cache.blocks,
                numerics=host_cache.numerics,
                checkpoint=checkpoint,
                checkpoint_at=partial(checkpoint_at, running=checkpoint),
                given=cast("StorageBackend | None", chosen.rank.get("storage")),
            ),
            wakeup,
            {**observers.parts, **chosen.control},
            lifetime,
        )
        del host_cache  # used up (DP-30)
        link = connect(observers.info, wakeup)
        lifetime.callback(link.close)
        box = ControlContainer(
            settings=settings,
            specs=specs,
            plane=plane,
            frontend=link,
            **{**observers.parts, **grammars, **stored, **chosen.control, "wakeup": wakeup},
        )
        yield RankEngine(
            specs=specs,
            info=observers.info,
            loop=box.loop(),
            serving=EnterServing(sync_debug=sync, jit=jit),
            jit_sources=sources,
            device_type=device_type,
            preload=preloading(settings.grammar, grammars),
        )


def _open_plane(
    root: EngineContainer, lifetime: ExitStack, open_over: Callable[[DeviceHandle], HostDataPlane]
) -> tuple[DeviceSpecs, HostCacheFacts, HostDataPlane]:
    """Build the device side and take the build apart: the handle is the data plane's alone (DP-28, DP-32)."""
    build = root.device_build()
    with ExitStack() as unowned:
        unowned.callback(build.handle.close)
        plane = open_over(build.handle)
        unowned.pop_all()  # closed by the data plane from here on
    lifetime.callback(plane.close)
    lifetime.callback(plane.shutdown_cache)
    return build.specs, build.host_cache, plane


def _device_parts(
    given_parts: Mapping[str, object], matchers: GrammarMatchers, *, sync: SyncDebug, own_process: bool
) -> DeviceParts:
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
        matchers=matchers,
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
