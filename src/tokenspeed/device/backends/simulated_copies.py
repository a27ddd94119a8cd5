"""How long copies between a simulated device and its host take: their bytes over the link's bandwidth."""

from __future__ import annotations

import attrs

from tokenspeed.device.backends.simulated import Work
from tokenspeed.plane.specs import CacheGroupSpec


@attrs.frozen(eq=False)
class LinkCost:
    """`device.kv.host_cache.CopyCost`. The simulated pool is small; what counts are the model's bytes."""

    work: Work
    bytes_per_s: float
    groups: tuple[CacheGroupSpec, ...]

    def copied(self, group: int, blocks: int, share: float) -> None:
        self.work.charge(self.groups[group].bytes_per_block * share * blocks / self.bytes_per_s)
