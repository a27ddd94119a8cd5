"""The record of the attention side, made and used up inside `device.build` (DP-36, DP-38)."""

from __future__ import annotations

import attrs

from tokenspeed.device.executors.ports import BlockPool
from tokenspeed.device.kv.host_build import HostPlan
from tokenspeed.device.kv.host_cache import LayerPlace
from tokenspeed.device.kv.layout import CacheGroup
from tokenspeed.device.memory import MemoryPlan
from tokenspeed.device.parts import BoundModel
from tokenspeed.device.step import ForwardStep
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.storage import HostBytes


@attrs.frozen(kw_only=True)
class CacheStorage:
    """Layout of the pool: parents of `page_bytes` bytes, and how many tokens the finest group's block holds.

    With one group a parent is a block, over all layers.
    """

    num_pages: int
    page_tokens: int
    page_bytes: int


@attrs.frozen(kw_only=True)
class LayerPlacement:
    """Where a layer's keys and values are: the cache group, and the layer's number in it."""

    layer: int
    group: str
    index: int


@attrs.frozen(kw_only=True)
class HostCacheFacts:
    """What host-side tiers must know of the cache: plain values, and the host tier's memory. No device buffer.

    Attributes:
        numerics: names what computes the blocks' bytes; the same name, the same bytes for the same tokens.
        host_parents: LCM parents of the tier in host memory.
        images: retraction images beside it.
        blocks: the tier's blocks by group, uint8 ``[blocks, layers, layer_bytes]``; () without a tier.
    """

    storage: CacheStorage
    groups: tuple[str, ...]
    layers: int
    attention: str
    numerics: str = ""
    host_parents: int = 0
    images: int = 0
    blocks: tuple[HostBytes, ...] = attrs.field(default=(), repr=False, eq=False)


@attrs.frozen(kw_only=True, eq=False)
class AttentionBuild:
    """What building attention yields. Never leaves device construction.

    Attributes:
        backend: which implementation of attention the step uses, for logs and host tiers.
        step: the model bound to `pool`.
        placement: one entry a layer, in order.
    """

    backend: str
    step: ForwardStep
    pool: BlockPool
    storage: CacheStorage
    placement: tuple[LayerPlacement, ...]

    def host_facts(self, host: HostPlan, numerics: str, blocks: tuple[HostBytes, ...]) -> HostCacheFacts:
        groups = tuple(dict.fromkeys(layer.group for layer in self.placement))
        return HostCacheFacts(
            storage=self.storage,
            groups=groups,
            layers=len(self.placement),
            attention=self.backend,
            numerics=numerics,
            host_parents=host.parents,
            images=host.images,
            blocks=blocks,
        )

    def layer_places(self, groups: tuple[CacheGroupSpec, ...]) -> tuple[LayerPlace, ...]:
        """The placement, with the groups' numbers."""
        numbers = {group.name: number for number, group in enumerate(groups)}
        return tuple(LayerPlace(place.layer, numbers[place.group], place.index) for place in self.placement)


def attention_build(bound: BoundModel, memory: MemoryPlan, groups: tuple[CacheGroup, ...]) -> AttentionBuild:
    """The record of a bound model; `groups` are those its pool was planned with."""
    placed = [
        LayerPlacement(layer=layer, group=group.name, index=index)
        for group in groups
        for index, layer in enumerate(group.layers)
    ]
    return AttentionBuild(
        backend="paged",
        step=bound.step,
        pool=bound.pool,
        storage=CacheStorage(
            num_pages=memory.num_pages, page_tokens=memory.layout.page_tokens, page_bytes=memory.layout.parent_bytes
        ),
        placement=tuple(sorted(placed, key=lambda layer: layer.layer)),
    )
