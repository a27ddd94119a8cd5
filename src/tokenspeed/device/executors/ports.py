"""What an executor needs beside step and sampler; called inside jobs of the exec stream only."""

from __future__ import annotations

from typing import Protocol

import torch

from tokenspeed.plane.plan import BlockCopy, GroupBlocks
from tokenspeed.plane.storage import HostBytes

__all__ = ["BlockBytes", "BlockPool", "HostBytes", "Logprobs", "SlotStates"]


class BlockBytes(Protocol):
    """Device blocks as bytes, for copies to and from other memory."""

    def layer_bytes(self, group: int) -> torch.Tensor:
        """A view of the pool: uint8 ``[blocks, layers, bytes]`` of cache group `group`.

        The first index is the block's id, the second the layer's number within the group; a layer of
        a block is one run. Padding between blocks is not in the view. Raises InvariantBroken: the
        pool has no such group.
        """
        ...


class BlockPool(BlockBytes, Protocol):
    """The KV pool, as far as blocks are moved without looking into them."""

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """As if all sources, of all groups, were read before the first write (RA-33)."""
        ...

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None: ...


class SlotStates(Protocol):
    """What the executor keeps for a slot and a retraction image must carry (RA-43, SP-45).

    Token histories are not of it: a seat brings them anew. `export` and `restore` are called inside
    jobs of the write and the load stream, `expect` on ``ts-forward``.
    """

    @property
    def slot_bytes(self) -> int: ...

    def expect(self, slot: int) -> None:
        """A restore is queued: the slot's next owner may refer to its latest token as FROM_DEVICE."""
        ...

    def export(self, slot: int, into: HostBytes) -> None:
        """Copy the slot's state to `into`, ``[slot_bytes]``."""
        ...

    def restore(self, slot: int, kept: HostBytes) -> None: ...


class Logprobs(Protocol):
    """Log-probabilities under the model itself: log-softmax of raw logits, before any sampling rule."""

    def __call__(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of `tokens` (int64 ``[m]``), and of the `top` likeliest tokens of each row.

        Returns: values float32 ``[m]``; ids int64 ``[m, top]``, best first; their values ``[m, top]``.
        """
        ...
