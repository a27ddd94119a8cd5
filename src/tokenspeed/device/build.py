"""Make the whole device side and hand back five things; everything else stays local (DP-26).

When `build_device_side` returns, the device side is complete and warm: nothing is wired later.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Protocol, cast

import attrs
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.progress import NoProgress, Progress
from tokenspeed.device.attention_build import AttentionBuild, HostCacheFacts, attention_build
from tokenspeed.device.backends.base import Backend
from tokenspeed.device.backends.cpu import open_cpu_backend
from tokenspeed.device.backends.cuda import open_cuda_backend
from tokenspeed.device.backends.cuda_parts import cuda_parts
from tokenspeed.device.backends.host_stream import JobWatch
from tokenspeed.device.backends.simulated_parts import simulated_parts, simulated_settings
from tokenspeed.device.executors.futures.executor import futures_executor
from tokenspeed.device.executors.futures.model_input import powers_of_two
from tokenspeed.device.executors.streams import stream_executor
from tokenspeed.device.fresh_blocks import fresh_blocks
from tokenspeed.device.handle import Executor, HostTier, NoHostTier, StreamDeviceHandle
from tokenspeed.device.host_sync import allowed_wait
from tokenspeed.device.kv.host_build import HostPlan, counters_for, host_cache
from tokenspeed.device.machine import Machine, read_machine, wait_policy_hint
from tokenspeed.device.memory import (
    MemoryPlan,
    check_weights_fit,
    longest_wanted,
    memory_budget,
)
from tokenspeed.device.model_choice import model_factory
from tokenspeed.device.native.draw import sampler_of
from tokenspeed.device.numerics import numerics_of
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.parts import DeviceParts, ModelFactory, SamplerFactory
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.sampling.base import Sampler, logprobs
from tokenspeed.device.sampling.processors import LogitsProcessor
from tokenspeed.device.sampling.registry import load_processors
from tokenspeed.device.specs_of import specs_of
from tokenspeed.device.step import ForwardStep
from tokenspeed.device.stream_order import checked_backend, checked_step
from tokenspeed.device.survey import host_of, memory_of
from tokenspeed.device.warm_up import warm_up
from tokenspeed.device.weights.current import CurrentStep, current_step, pool_memory, pool_parts
from tokenspeed.device.weights.update import FixedOccupancy, HostOccupancy, Occupancy, OccupancyState
from tokenspeed.errors import NotSupported, SettingsError
from tokenspeed.plane.ports import DeviceHandle
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.settings.model import Backend as BackendKind
from tokenspeed.settings.model import DeviceSettings, Settings
from tokenspeed.settings.model import Executor as ExecutorKind

log = logging.getLogger(__name__)


class OpenBackend(Protocol):
    def __call__(self, threads: int, watch: JobWatch = ...) -> Backend: ...


OPENERS: Mapping[BackendKind, OpenBackend] = MappingProxyType(
    {BackendKind.CPU: open_cpu_backend, BackendKind.CUDA: open_cuda_backend}
)
"""The one place where a backend's name becomes a backend, with the number of compute threads and the jobs' watch."""


@attrs.frozen(kw_only=True, eq=False)
class DeviceBuild:
    """All that a build hands out. The bootstrap takes it apart and keeps none of it (DP-32).

    Attributes:
        specs: plain values for planning.
        handle: everything the control plane can ask for; for `open_data_plane` and nobody else.
        transfer: settings and fences for a transfer peer; None: this build has none.
        host_cache: layout of the cache for host-side tiers, as plain values.
        encoder_model_facts: resolves the facts of the model's encoder; raises NotSupported for a
            model that reads text only.
    """

    specs: DeviceSpecs
    handle: DeviceHandle
    transfer: None
    host_cache: HostCacheFacts
    encoder_model_facts: Callable[[], object]


@attrs.frozen(kw_only=True, eq=False)
class TextOnly:
    """The `encoder_model_facts` of a model without an encoder."""

    model_name: str

    def __call__(self) -> object:
        raise NotSupported(f"{self.model_name} reads text only: it has no encoder")


def build_device_side(
    settings: Settings,
    checkpoint: Checkpoint,
    parts: DeviceParts | None = None,
    progress: Progress | None = None,
) -> DeviceBuild:
    """Open the device, load the model, size and allocate the pool, run one request through.

    Whatever was opened is closed again if a step fails.

    Raises: SettingsError: the settings do not fit machine or model. ModelError: the weights cannot
        be loaded, or compute no numbers. NotSupported: the backend is not in this build.
    """
    given, watch = parts or DeviceParts(), progress or NoProgress()
    if settings.device.backend is BackendKind.SIMULATED:
        settings = simulated_settings(settings)
        given = simulated_parts(settings, checkpoint, given)
    elif settings.device.backend is BackendKind.CUDA:
        given = cuda_parts(settings, checkpoint, given)
    machine = given.machine or read_machine()
    model: ModelFactory = given.model or model_factory(settings.device, checkpoint.config)
    with ExitStack() as opened:
        backend = checked_backend(open_backend(settings.device, machine, given.backend, given.watch), os.environ)
        opened.callback(backend.close)
        attention, memory, host, step = _load(settings, checkpoint, model, backend, machine, watch)
        specs = specs_of(settings, checkpoint, memory, host)
        make_sampler = given.sampler or sampler_of(model)
        if processors := load_processors(settings.sampling.logits_processors):
            make_sampler = _with_processors(make_sampler, processors)
        executor = on_stream(
            backend.exec_stream,
            lambda: _executor(settings.device, backend, attention, specs, given, make_sampler),
            "executor",
        )
        opened.callback(executor.close)
        host_tier = on_stream(
            backend.exec_stream, lambda: _host_tier(backend, attention, step, specs, executor, given), "host tier"
        )
        watch.step("warm-up", 0, 1)
        warm_up(executor, specs)
        watch.step("warm-up", 1, 1)
        handle = StreamDeviceHandle(
            backend=backend,
            executor=executor,
            profiler=TraceProfiler(stream=backend.exec_stream),
            rounds=given.rounds,
            host_tier=host_tier,
            occupancy=_occupancy(settings, checkpoint, model, backend, attention, step, host_tier),
        )
        opened.pop_all()
    return DeviceBuild(
        specs=specs,
        handle=handle,
        transfer=None,
        host_cache=attention.host_facts(host, numerics_of(step, settings), host_tier.regions()),
        encoder_model_facts=TextOnly(model_name=specs.model_name),
    )


def open_backend(
    device: DeviceSettings,
    machine: Machine,
    given: Callable[[int], Backend] | None = None,
    watch: JobWatch = nullcontext,
) -> Backend:
    """The backend that was given or that the settings name, with the threads they or the machine allow.

    Raises: NotSupported: this build has no such backend.
    """
    known_opener = OPENERS.get(device.backend)
    opener = given or (partial(known_opener, watch=watch) if known_opener else None)
    if opener is None:
        known = ", ".join(kind.value for kind in (*OPENERS, BackendKind.SIMULATED))
        raise NotSupported(f"device.backend: this build has no {device.backend.value!r} backend; it has: {known}")
    threads = device.threads or machine.cpus
    log.info("compute: %d threads (%s)", threads, "device.threads" if device.threads else machine.cpu_source)
    if device.backend is BackendKind.CPU and (hint := wait_policy_hint(os.environ, threads=threads)):
        log.info("%s", hint)
    return opener(threads)


def _load(
    settings: Settings,
    checkpoint: Checkpoint,
    model: ModelFactory,
    backend: Backend,
    machine: Machine,
    progress: Progress,
) -> tuple[AttentionBuild, MemoryPlan, HostPlan, ForwardStep]:
    """Weights first, because what they leave of the budget is the pool's."""
    config, page_tokens, stream = checkpoint.config, settings.cache.page_tokens, backend.exec_stream
    budget = memory_budget(settings.device, machine)
    check_weights_fit(budget, model.expected_bytes(config))
    longest_wanted(settings, config.max_positions)  # refuses before the weights are read
    weights = on_stream(stream, lambda: model.load(checkpoint, progress), "load")
    memory = memory_of(settings, config, model, budget, weights.nbytes)
    host = host_of(settings, memory, machine)
    for line in (*memory.lines(), *host.lines()):
        log.info("%s", line)
    bound = on_stream(stream, lambda: model.bind(weights, num_pages=memory.num_pages, page_tokens=page_tokens), "bind")
    attention = attention_build(bound, memory, model.cache_groups(config, page_tokens))
    return attrs.evolve(attention, step=current_step(bound.step)), memory, host, bound.step


def _occupancy(
    settings: Settings,
    checkpoint: Checkpoint,
    model: ModelFactory,
    backend: Backend,
    attention: AttentionBuild,
    step: ForwardStep,
    host_tier: HostTier,
) -> Occupancy:
    """`step`: the one first in force."""
    if settings.device.backend is not BackendKind.CPU or not isinstance(attention.step, CurrentStep):
        name = settings.device.backend.value
        return FixedOccupancy(f"device.backend {name} keeps its weights and its memory; cpu can change them")
    kept = (*pool_memory(attention.pool), *(torch.from_numpy(memory) for memory in host_tier.memory()))
    return HostOccupancy(
        stream=backend.exec_stream,
        factory=model,
        page_tokens=settings.cache.page_tokens,
        current=attention.step,
        parts=pool_parts(step, attention.pool),
        kv_memory=kept,
        state=OccupancyState(checkpoint=checkpoint),
    )


def _host_tier(
    backend: Backend,
    attention: AttentionBuild,
    step: ForwardStep,
    specs: DeviceSpecs,
    executor: Executor,
    given: DeviceParts,
) -> HostTier:
    if not specs.host_parents:
        return NoHostTier()
    return host_cache(
        backend=backend,
        pool=attention.pool,
        slots=executor.slot_states,
        specs=specs,
        placement=attention.layer_places(specs.groups),
        counters=counters_for(step),
        parts=given.tier,
        cost=None if given.copy_cost is None else given.copy_cost(specs.groups),
    )


def _with_processors(make: SamplerFactory, processors: Mapping[str, LogitsProcessor]) -> SamplerFactory:
    """Raises: SettingsError: the sampler has no place for processors."""
    if "processors" not in inspect.signature(make).parameters:
        raise SettingsError("sampling.logits_processors: this device's sampler takes none; leave it empty")
    return partial(cast("Callable[..., Sampler]", make), processors=processors)


def _executor(
    device: DeviceSettings,
    backend: Backend,
    attention: AttentionBuild,
    specs: DeviceSpecs,
    given: DeviceParts,
    make_sampler: SamplerFactory,
) -> Executor:
    """Raises: SettingsError: the sampler does not go with the executor."""
    make: Callable[..., Executor] = stream_executor
    if device.executor is ExecutorKind.FUTURES:
        # A device that compiles a program for each shape gets few shapes; the CPU takes any.
        buckets = powers_of_two(specs.max_num_seqs) if device.backend is BackendKind.SIMULATED else ()
        make = partial(futures_executor, asynchronous=device.async_scheduling, buckets=buckets, host_sync=allowed_wait)
    step = checked_step(attention.step, backend)
    if device.backend is not BackendKind.CUDA:  # a debug form for memory of the host
        step = fresh_blocks(step, attention.pool, specs.groups, os.environ)
    return make(
        backend=backend,
        step=step,
        pool=attention.pool,
        sampler=make_sampler(slots=specs.request_slots, vocab_size=specs.vocab_size),
        logprobs=given.logprobs or logprobs,
        request_slots=specs.request_slots,
        max_model_len=specs.max_model_len,
        num_pages=specs.num_pages,
        groups=specs.groups,
        matchers=given.matchers,
    )
