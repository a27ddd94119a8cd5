"""What takes the place of a machine's parts where the settings ask for a simulated device."""

from __future__ import annotations

from functools import partial

import attrs

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.device.attention.groups import attention_groups
from tokenspeed.device.backends.simulated import Work, open_simulated_backend
from tokenspeed.device.backends.simulated_copies import LinkCost
from tokenspeed.device.backends.simulated_model import SimulatedLogprobs, SimulatedModel, SimulatedSampler
from tokenspeed.device.backends.simulated_roofline import ACCELERATORS, KV_BYTES, model_shape, step_time
from tokenspeed.device.kv.layout import cache_layout
from tokenspeed.device.machine import Machine
from tokenspeed.device.parts import DeviceParts
from tokenspeed.device.sampling.base import Sampler
from tokenspeed.device.specs_of import vocabulary_of
from tokenspeed.settings.model import Settings

GIB = 1 << 30
USABLE_SHARE = 0.9
"""Of an accelerator's memory, for weights, pool and working memory."""


@attrs.frozen(eq=False)
class SamplerOfTokens:
    """`device.parts.SamplerFactory` of the simulated model."""

    def __call__(self, *, slots: int, vocab_size: int) -> Sampler:
        return SimulatedSampler()


def simulated_settings(settings: Settings) -> Settings:
    """The memory budget is the accelerator's, unless `device.memory_gib` says otherwise."""
    if settings.device.memory_gib is not None:
        return settings
    memory = ACCELERATORS[settings.simulated.accelerator].memory_bytes
    return attrs.evolve(settings, device=attrs.evolve(settings.device, memory_gib=USABLE_SHARE * memory / GIB))


def simulated_parts(settings: Settings, checkpoint: Checkpoint, given: DeviceParts) -> DeviceParts:
    """`given`, completed with the parts of the simulated device."""
    asked, work, vocab_size = settings.simulated, Work(), vocabulary_of(checkpoint)
    model = SimulatedModel(
        work=work,
        time=step_time(checkpoint.config, asked),
        weight_bytes=model_shape(checkpoint.config, asked).weight_bytes,
        vocab_size=vocab_size,
        seed=asked.seed,
        max_tokens=settings.scheduler.max_batched_tokens,
        groups=cache_layout(
            attention_groups(checkpoint.config, settings.cache.page_tokens, number_bytes=KV_BYTES)
        ).groups,
    )
    return attrs.evolve(
        given,
        backend=given.backend or (lambda _threads: open_simulated_backend(work=work)),
        model=given.model or model,
        sampler=given.sampler or SamplerOfTokens(),
        logprobs=given.logprobs or SimulatedLogprobs(vocab_size=vocab_size),
        machine=given.machine or simulated_machine(settings),
        copy_cost=given.copy_cost or partial(LinkCost, work, ACCELERATORS[asked.accelerator].link_bytes_per_s),
    )


def simulated_machine(settings: Settings) -> Machine:
    """The accelerator's memory; one thread is enough, since nothing is computed."""
    name = settings.simulated.accelerator
    return Machine(
        available_bytes=ACCELERATORS[name].memory_bytes,
        memory_source=f"memory of a simulated {name.value}",
        cpus=1,
        cpu_source="simulated device",
    )
