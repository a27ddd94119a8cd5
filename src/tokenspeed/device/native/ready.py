"""How many layers of a load have arrived, as a number that C can wait on."""

from __future__ import annotations

import ctypes
import threading

import attrs

from tokenspeed.device.layer_counter import LayerCount, LayersArrived
from tokenspeed.device.native.library import NativeLibrary


@attrs.frozen(eq=False)
class LayerCounter(LayersArrived):
    """`LayersArrived` that a native step waits on without returning to Python between layers.

    C does not know of failures: whoever waited there asks `wait_for` afterwards.
    """

    library: NativeLibrary
    count: LayerCount = attrs.field(factory=LayerCount)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.count.value)

    def publish(self, layers: int) -> None:
        self.library.calls.ts_raise_layers(self.address, layers)
