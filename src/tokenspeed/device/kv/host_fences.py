"""The waits between streams that keep the host tier's copies in order, each with a name.

A wait is submitted through `Fences`, so that a check can leave out one at a time and see which
token or byte goes wrong.

What the fences do not have to cover, because the scheduler does: it grants no device block of a load
or restore before its acknowledgment, none of an ordinary store before its; it reads no host block
or image before the acknowledgment of the store that fills it, and fills none before the
acknowledgment of the load that reads it.
"""

from __future__ import annotations

import enum
from typing import Protocol

from tokenspeed.device.backends.base import DeviceEvent, DeviceStream
from tokenspeed.device.step import LayersReady


class Fence(enum.Enum):
    """One for each reason that a stream waits.

    STORE_AFTER_PLANS: stores begin behind all that earlier plans do on the exec stream, whose
        forwards wrote the blocks and slot states that are stored, and waited for the loads that
        filled others (RA-27, RA-30).
    PLAN_AFTER_STORES: what follows in the plan on the exec stream, copies, zeroing and forward, begins
        when its stream-ordered stores have read (RA-29, RA-43).
    LOAD_AFTER_PLAN: loads begin behind the plan's zeroing and copies, and behind earlier forwards,
        which may still read what the blocks held (RA-35). The exec stream's part of the plan is
        behind the store fence, and so the loads are.
    FORWARD_AFTER_LAYER: a forward reads a layer when the load-backs of its plan have brought it (RA-36).
    FORWARD_AFTER_LOAD: the same for devices whose forward cannot stop between layers: the exec stream
        waits for the load's end (RA-37).
    """

    STORE_AFTER_PLANS = "store after plans"
    PLAN_AFTER_STORES = "plan after stores"
    LOAD_AFTER_PLAN = "load after plan"
    FORWARD_AFTER_LAYER = "forward after layer"
    FORWARD_AFTER_LOAD = "forward after load"


class Fences(Protocol):
    """Submits the waits. Called from ``ts-forward``."""

    def wait(self, fence: Fence, stream: DeviceStream, event: DeviceEvent) -> None:
        """Jobs submitted to `stream` from here on begin after `event`."""
        ...

    def layers(self, fence: Fence, ready: LayersReady) -> LayersReady:
        """What the plan's forward waits on."""
        ...


class AllFences:
    """Every wait, as it was asked for."""

    def wait(self, fence: Fence, stream: DeviceStream, event: DeviceEvent) -> None:
        stream.wait(event)

    def layers(self, fence: Fence, ready: LayersReady) -> LayersReady:
        return ready
