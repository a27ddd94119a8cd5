"""The record of the attention side, made and used up inside `device.build` (DP-36, DP-38)."""

from __future__ import annotations

import attrs

from tokenspeed.device.executors.ports import BlockPool
from tokenspeed.device.memory import MemoryPlan
from tokenspeed.device.parts import BoundModel
from tokenspeed.device.step import ForwardStep

FULL_ATTENTION = "full"


@attrs.frozen(kw_only=True)
class CacheStorage:
    """Layout of the pool: pages of `page_tokens` tokens, each `page_bytes` over all layers."""

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
    """What a host tier must know of the cache; plain values, no buffer."""

    storage: CacheStorage
    groups: tuple[str, ...]
    layers: int
    attention: str


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

    def host_facts(self) -> HostCacheFacts:
        groups = tuple(dict.fromkeys(layer.group for layer in self.placement))
        return HostCacheFacts(storage=self.storage, groups=groups, layers=len(self.placement), attention=self.backend)


def attention_build(bound: BoundModel, memory: MemoryPlan, *, layers: int) -> AttentionBuild:
    """The record of a model whose layers all attend to everything."""
    return AttentionBuild(
        backend="paged",
        step=bound.step,
        pool=bound.pool,
        storage=CacheStorage(num_pages=memory.num_pages, page_tokens=memory.page_tokens, page_bytes=memory.page_bytes),
        placement=tuple(LayerPlacement(layer=i, group=FULL_ATTENTION, index=i) for i in range(layers)),
    )
