"""What a retraction image keeps of a slot beside its blocks: the latest token, where only the device has it."""

from __future__ import annotations

import attrs
import torch

from tokenspeed.device.backends.base import DeviceBuffer
from tokenspeed.device.executors.ports import HostBytes
from tokenspeed.device.executors.slots import SlotState
from tokenspeed.device.kv.block_mover import copy_in, copy_out

TOKEN_BYTES = 8


@attrs.frozen(kw_only=True, eq=False)
class TokensOnDevice:
    """`SlotStates` of an executor that keeps each slot's latest token in a device buffer.

    Attributes:
        tokens: int64 ``[slots]``.
    """

    slots: SlotState
    tokens: DeviceBuffer
    slot_bytes: int = TOKEN_BYTES

    def expect(self, slot: int) -> None:
        self.slots.adopt(slot)

    def export(self, slot: int, into: HostBytes) -> None:
        with torch.inference_mode():
            copy_out(self.tokens.unwrap((slot,))[slot : slot + 1], into)

    def restore(self, slot: int, kept: HostBytes) -> None:
        with torch.inference_mode():
            copy_in(kept, self.tokens.unwrap((slot,))[slot : slot + 1])


@attrs.frozen(kw_only=True, eq=False)
class TokensOnHost:
    """`SlotStates` of an executor whose tokens the host has as soon as they land: an image needs none.

    A request is restored after its last forward has landed, and its seat takes the tokens from the
    worker's own table.
    """

    slots: SlotState
    slot_bytes: int = 0

    def expect(self, slot: int) -> None:
        self.slots.adopt(slot)

    def export(self, slot: int, into: HostBytes) -> None:
        return None

    def restore(self, slot: int, kept: HostBytes) -> None:
        return None
