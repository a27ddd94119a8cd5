"""How many layers of a load have arrived, as a number that C can wait on."""

from __future__ import annotations

import ctypes
import threading

import attrs

from tokenspeed.device.native.library import NativeLibrary


@attrs.define(eq=False)
class LayerCount:
    """Writer: the thread that loads."""

    value: ctypes.c_int32 = attrs.field(factory=ctypes.c_int32)


@attrs.frozen(eq=False)
class LayerCounter:
    """`device.step.LayersReady` that a native step waits on without returning to Python between layers."""

    library: NativeLibrary
    count: LayerCount = attrs.field(factory=LayerCount)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.count.value)

    def raise_to(self, layers: int) -> None:
        """KV of layers below `layers` is there. Any thread; the number never goes down."""
        with self.changed:
            self.library.calls.ts_raise_layers(self.address, layers)
            self.changed.notify_all()

    def wait_for(self, layer: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.count.value.value > layer)
