"""How large the host tier and the image pool are, and their construction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from tokenspeed.device.backends.base import Backend
from tokenspeed.device.executors.ports import BlockBytes, SlotStates
from tokenspeed.device.kv.block_mover import MemoryMover, TierParts
from tokenspeed.device.kv.host_buffers import HostBuffers, HostGroup, HostLayout, host_buffers
from tokenspeed.device.kv.host_cache import CopyCost, HostCacheExecutor, LayerPlace, LoadWait, NoCost
from tokenspeed.device.kv.host_checks import OpChecks
from tokenspeed.device.kv.host_fences import AllFences, Fences
from tokenspeed.device.layer_counter import LayersArrived
from tokenspeed.device.native.ready import LayerCounter
from tokenspeed.device.native.step import NativeStep
from tokenspeed.device.step import ForwardStep
from tokenspeed.errors import SettingsError
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs
from tokenspeed.settings.model import CacheSettings

GIB = 1 << 30
MIB = 1 << 20
LEAST_PARENTS = 2
"""The null parent, and one to use."""


@attrs.frozen(kw_only=True)
class HostPlan:
    """The decision. `parents` includes the null parent; 0: no host tier."""

    parents: int = 0
    parent_bytes: int = 0
    images: int = 0
    image_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.parents * self.parent_bytes + self.images * self.image_bytes

    def lines(self) -> tuple[str, ...]:
        """What is printed at start; nothing where there is nothing."""
        if not self.parents:
            return ()
        tier = f"{self.parents - 1:,} pages = {self.parents * self.parent_bytes / MIB:,.1f} MiB"
        images = f"; {self.images:,} retraction images = {self.images * self.image_bytes / MIB:,.1f} MiB"
        return (f"host tier: {tier}{images if self.images else ''}, taken as it fills",)


def plan_host(
    cache: CacheSettings, groups: tuple[CacheGroupSpec, ...], *, taken: int, available: int | None, source: str
) -> HostPlan:
    """
    Args:
        taken: bytes that the engine takes beside the host tier.
        available: bytes of the machine; None: not known.
        source: where that number is from, for people.
    Raises: SettingsError: it does not fit the machine, or is not one page.
    """
    if not cache.host_gib:
        return HostPlan()
    parent_bytes = max(group.blocks_per_parent * group.bytes_per_block for group in groups)
    parents = int(cache.host_gib * GIB) // parent_bytes
    if parents < LEAST_PARENTS:
        raise SettingsError(
            f"cache.host_gib: {cache.host_gib:g} GiB hold no page beside the null page; "
            f"at least {LEAST_PARENTS * parent_bytes / GIB + 0.005:.2f} do"
        )
    plan = HostPlan(
        parents=parents,
        parent_bytes=parent_bytes,
        images=cache.images,
        image_bytes=sum(group.image_blocks * group.bytes_per_block for group in groups),
    )
    if available is not None and taken + plan.nbytes > available:
        raise SettingsError(
            f"cache.host_gib: the host tier's {plan.nbytes / MIB:,.1f} MiB (images included) and the engine's "
            f"{taken / MIB:,.1f} MiB are more than the {available / MIB:,.1f} MiB available ({source}); lower "
            f"cache.host_gib, cache.images or device.memory_gib"
        )
    return plan


def host_cache(
    *,
    backend: Backend,
    pool: BlockBytes,
    slots: SlotStates,
    specs: DeviceSpecs,
    placement: tuple[LayerPlace, ...],
    counters: Callable[[], LayersArrived] = LayersArrived,
    load_wait: LoadWait = LoadWait.LAYERS,
    cost: CopyCost | None = None,
    fences: Fences | None = None,
    parts: TierParts | None = None,
) -> HostCacheExecutor:
    """An executor with empty buffers. Call it inside a job of the exec stream: it looks at the pool.

    A pool that is not divided into the layers of `placement`, as those of models that run whole, is
    loaded whole before a forward begins.

    Raises: SettingsError: the system does not give the memory.
    """
    shapes = [pool.layer_bytes(number).shape for number in range(len(specs.groups))]
    every = [(group, index) for group, shape in enumerate(shapes) for index in range(shape[1])]
    if sorted((place.group, place.index) for place in placement) != every:
        load_wait = LoadWait.WHOLE
        placement = tuple(LayerPlace(0, group, index) for group, index in every)
    layout = HostLayout(
        groups=tuple(
            HostGroup(
                blocks_per_parent=spec.blocks_per_parent,
                layers=shape[1],
                layer_bytes=shape[2],
                image_blocks=spec.image_blocks,
            )
            for spec, shape in zip(specs.groups, shapes, strict=True)
        ),
        parents=specs.host_parents,
        images=specs.images,
        slot_bytes=slots.slot_bytes,
    )
    buffers = _buffers(layout)
    if parts is not None:
        _pin(parts, buffers)
    return HostCacheExecutor(
        backend=backend,
        blocks=pool,
        slots=slots,
        buffers=buffers,
        placement=placement,
        counters=counters if parts is None else parts.counters,
        mover=MemoryMover() if parts is None else parts.mover,
        load_wait=load_wait,
        fences=fences or AllFences(),
        cost=cost or NoCost(),
        checks=OpChecks(layout=layout, device_parents=specs.num_pages, slots=specs.request_slots),
    )


def _buffers(layout: HostLayout) -> HostBuffers:
    try:
        return host_buffers(layout)
    except MemoryError:
        size = layout.parents * layout.parent_bytes + layout.images * layout.image_bytes
        raise SettingsError(
            f"cache.host_gib: the system does not give {size / MIB:,.1f} MiB of host memory; lower it or cache.images"
        ) from None


def _pin(parts: TierParts, buffers: HostBuffers) -> None:
    try:
        for memory in (buffers.l2, buffers.images):
            parts.pin(memory)
    except MemoryError as refused:
        raise SettingsError(f"cache.host_gib: {refused} for the host tier; lower it or cache.images") from None


def counters_for(step: ForwardStep) -> Callable[[], LayersArrived]:
    """Makes counters that `step` can wait on without coming back to Python, where it is one in C."""
    return partial(LayerCounter, step.library) if isinstance(step, NativeStep) else LayersArrived
