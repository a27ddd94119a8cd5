"""Layers of a load on a CUDA device: what has arrived is marked on the load stream and waited for on another."""

from __future__ import annotations

import attrs

from tokenspeed.device.backends.cuda_api import CudaApi, CudaEventLike
from tokenspeed.device.layer_counter import LayersArrived


@attrs.define(eq=False)
class LayerMarks:
    """Writer: the load's jobs, in order; read by the forward's job. Pairs: layers below are there after the event."""

    reached: list[tuple[int, CudaEventLike]] = attrs.field(factory=list[tuple[int, CudaEventLike]])


@attrs.frozen(eq=False, kw_only=True)
class CudaLayersArrived(LayersArrived):
    """`LayersArrived` whose number is ahead of the device: a load is launched before the forward that waits for it.

    `wait_for` therefore makes the current stream wait, and the host for the launch only, which is past.
    """

    api: CudaApi
    marks: LayerMarks = attrs.field(factory=LayerMarks)

    def publish(self, layers: int) -> None:
        event = self.api.event()
        event.record(self.api.current_stream())
        self.marks.reached.append((layers, event))
        super().publish(layers)

    def wait_for(self, layer: int) -> None:
        super().wait_for(layer)
        for layers, event in self.marks.reached:
            if layers > layer:
                self.api.current_stream().wait_event(event)
                return
