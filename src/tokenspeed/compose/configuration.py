"""What components are configured with: the settings, within what the device side decided."""

from __future__ import annotations

import numpy as np

from tokenspeed.control.kv_events import NoSink
from tokenspeed.control.l3 import L3, NoStorage
from tokenspeed.control.pd import Pd
from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import BoolArray
from tokenspeed.plane.ports import KvEventSink
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.scheduler.config import Retraction, Role, SchedulerConfig, WritePolicy
from tokenspeed.settings.choices import Backend, Executor, GrammarFill
from tokenspeed.settings.model import Settings


def scheduler_config(settings: Settings, specs: DeviceSpecs, sink: KvEventSink, l3: L3, pd: Pd) -> SchedulerConfig:
    """Cache changes are collected only if somebody takes them, and storage is asked only if there is one.

    Raises: SettingsError: the part `pd` names a role that there is not.
    """
    return SchedulerConfig(
        kv_events=not isinstance(sink, NoSink),
        storage=not isinstance(l3, NoStorage),
        storage_min_tokens=settings.storage.min_tokens,
        # A look-up and a fetch, each within the executor's limit; this one is for members that are late.
        storage_wait_s=2 * settings.storage.timeout_s,
        role=_role_of(pd),
        max_num_seqs=specs.max_num_seqs,
        spare_slots=specs.spare_slots,
        max_batched_tokens=specs.max_batched_tokens,
        chunk_tokens=min(settings.scheduler.chunk_tokens, specs.max_batched_tokens),
        page_tokens=specs.page_tokens,
        num_pages=specs.num_pages,
        max_model_len=specs.max_model_len,
        overlap_schedule_depth=settings.in_flight_depth,
        speculation_width=specs.speculation_width,
        prefix=settings.cache.prefix,
        groups=specs.groups,
        host_parents=specs.host_parents,
        images=specs.images,
        write_policy=WritePolicy(settings.cache.write_policy.value),
        retraction=tuple(Retraction(step.value) for step in settings.scheduler.retraction),
    )


def _role_of(pd: Pd) -> Role:
    name = pd.role
    try:
        return Role(name)
    except ValueError as unknown:
        known = ", ".join(role.value for role in Role)
        raise SettingsError(f"part 'pd': {name!r} is not allowed as role; expected one of {known}") from unknown


def fills_eagerly(settings: Settings) -> bool:
    """Which path constrained batches take (GR-7, GR-8): without a host node in the forward, the eager one."""
    if settings.grammar.fill is not GrammarFill.AUTO:
        return settings.grammar.fill is GrammarFill.EAGER
    return settings.device.executor is Executor.FUTURES or settings.device.backend is not Backend.CPU


def eos_mask(specs: DeviceSpecs) -> BoolArray:
    """bool ``[vocab]``, True at the model's EOS ids."""
    mask: BoolArray = np.zeros(specs.vocab_size, dtype=np.bool_)
    mask[[token for token in specs.eos_token_ids if token < specs.vocab_size]] = True
    return mask
