"""What the prefix cache found for a request, group by group."""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import EMPTY_INT32

NOWHERE = -1


@attrs.frozen(kw_only=True, eq=False)
class GroupHit:
    """Blocks of one group.

    Attributes:
        first: table index of the first of them.
        device: int32 ``[n]``, device blocks to share; NOWHERE where the host tier has it.
        host: int32 ``[n]``, host blocks to load; NOWHERE where the device has it.
        source: device block whose first tokens, or whose state, are right for the boundary: the
            request gets a private copy of it. NOWHERE: the hit ends with a block.
        host_source: the same in the host tier (state groups).
    """

    first: int = 0
    device: Int32Array = EMPTY_INT32
    host: Int32Array = EMPTY_INT32
    source: int = NOWHERE
    host_source: int = NOWHERE

    @property
    def end(self) -> int:
        """Table index behind the whole blocks."""
        return self.first + len(self.device)

    @property
    def shared(self) -> Int32Array:
        blocks: Int32Array = self.device[self.device != NOWHERE]
        return blocks

    @property
    def loaded(self) -> Int32Array:
        blocks: Int32Array = self.host[self.host != NOWHERE]
        return blocks


@attrs.frozen(kw_only=True, eq=False)
class Hit:
    """A known prefix of `tokens` tokens; one entry a group."""

    tokens: int
    groups: tuple[GroupHit, ...]
