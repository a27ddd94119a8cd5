"""What a build would decide, without a device, a thread or a weight."""

from __future__ import annotations

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.backends.cuda_parts import cuda_parts
from tokenspeed.device.backends.simulated_parts import simulated_machine, simulated_parts, simulated_settings
from tokenspeed.device.backends.simulated_roofline import model_shape
from tokenspeed.device.defaults import ModelFromWeights
from tokenspeed.device.kv.host_build import HostPlan, plan_host
from tokenspeed.device.kv.layout import cache_layout
from tokenspeed.device.machine import Machine, read_machine
from tokenspeed.device.memory import (
    Budget,
    MemoryPlan,
    ModelNeeds,
    check_weights_fit,
    longest_wanted,
    memory_budget,
    plan_memory,
    working_bytes,
)
from tokenspeed.device.model_choice import model_factory
from tokenspeed.device.parts import DeviceParts, ModelFactory
from tokenspeed.settings.model import Backend, Settings


def memory_of(
    settings: Settings, config: ModelConfig, model: ModelFactory, budget: Budget, weights_bytes: int
) -> MemoryPlan:
    """Pool and longest request for a model whose weights take `weights_bytes`. Raises: SettingsError."""
    layout = cache_layout(model.cache_groups(config, settings.cache.page_tokens))
    needs = ModelNeeds(
        weights_bytes=weights_bytes,
        layout=layout,
        scratch_per_page=2 * layout.largest_layer_bytes,
        max_positions=config.max_positions,
    )
    longest = longest_wanted(settings, config.max_positions)
    return plan_memory(settings, budget, needs, working_bytes(config, settings.scheduler, longest))


def host_of(settings: Settings, memory: MemoryPlan, machine: Machine) -> HostPlan:
    """Host tier and image pool beside what `memory` says. Raises: SettingsError.

    The host of a simulated device has no limit: what is copied there is small.
    """
    simulated = settings.device.backend is Backend.SIMULATED
    if settings.device.backend is Backend.CUDA:
        host = read_machine()  # `machine` has the device's memory, where all the rest is
        return plan_host(
            settings.cache,
            memory.layout.groups,
            taken=0,
            available=host.available_bytes,
            source=host.memory_source,
        )
    return plan_host(
        settings.cache,
        memory.layout.groups,
        taken=memory.weights_bytes + memory.working_bytes + memory.pool_bytes,
        available=None if simulated else machine.available_bytes,
        source=machine.memory_source,
    )


def survey(settings: Settings, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Threads and memory as `build_device_side` would choose them now, as lines for people.

    The weights' size is an estimate from the configuration. Raises: SettingsError: it does not fit.
    """
    if settings.device.backend is Backend.SIMULATED:
        return _simulated(simulated_settings(settings), checkpoint)
    parts = DeviceParts()
    if settings.device.backend is Backend.CUDA:
        parts = cuda_parts(settings, checkpoint, parts)
    machine = parts.machine or read_machine()
    model = parts.model or model_factory(settings.device, checkpoint.config)
    budget = memory_budget(settings.device, machine)
    expected = model.expected_bytes(checkpoint.config)
    check_weights_fit(budget, expected)
    threads = settings.device.threads or machine.cpus
    why = "device.threads" if settings.device.threads else machine.cpu_source
    backend = f"{settings.device.backend.value} backend, {threads} compute threads ({why})"
    memory = memory_of(settings, checkpoint.config, model, budget, expected)
    return (backend, *memory.lines(), *host_of(settings, memory, machine).lines())


def _simulated(settings: Settings, checkpoint: Checkpoint) -> tuple[str, ...]:
    parts = simulated_parts(settings, checkpoint, DeviceParts())
    machine = simulated_machine(settings)
    budget = memory_budget(settings.device, machine)
    weights = model_shape(checkpoint.config, settings.simulated).weight_bytes
    model = parts.model or ModelFromWeights()
    backend = f"simulated {settings.simulated.accelerator.value}: times from its data sheet, no weights"
    memory = memory_of(settings, checkpoint.config, model, budget, weights)
    return (backend, *memory.lines(), *host_of(settings, memory, machine).lines())
