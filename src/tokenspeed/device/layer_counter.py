"""How many layers of a load have arrived: what a load raises and a forward waits on."""

from __future__ import annotations

import ctypes
import threading

import attrs

EVERY_LAYER = 0x7FFFFFFF
"""More than any model has: what the count is raised to when nothing more will arrive."""


@attrs.define(eq=False)
class LayerCount:
    """Writer: the counter, under its condition. The number is a C one, so that C can wait on its address."""

    value: ctypes.c_int32 = attrs.field(factory=ctypes.c_int32)
    error: BaseException | None = None


@attrs.frozen(eq=False)
class LayersArrived:
    """`device.step.LayersReady` of one load. Any thread raises it; the number never goes down."""

    count: LayerCount = attrs.field(factory=LayerCount)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def raise_to(self, layers: int) -> None:
        """KV of layers below `layers` is there."""
        with self.changed:
            if layers > self.count.value.value:
                self.publish(layers)
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing more will arrive: whoever waits goes on, and is told by `wait_for`."""
        with self.changed:
            self.count.error = self.count.error or error
            self.publish(EVERY_LAYER)
            self.changed.notify_all()

    def wait_for(self, layer: int) -> None:
        """See `LayersReady.wait_for`. Raises: what the load raised."""
        with self.changed:
            self.changed.wait_for(lambda: self.count.value.value > layer)
        if self.count.error is not None:
            raise self.count.error

    def publish(self, layers: int) -> None:
        """Write the number; called under the condition."""
        self.count.value.value = layers
