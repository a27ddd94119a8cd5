"""Operations on memory and weights: the device half of what `ControlOps` queues, agreed by the replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs

from tokenspeed.plane.operations import (
    KV_CACHE,
    CloseGroupOp,
    DrainedOp,
    OpenGroupOp,
    ReleaseMemoryOp,
    ResumeMemoryOp,
    UpdateWeightsOp,
    WeightVersionOp,
)
from tokenspeed.plane.ports import DataPlane, Mesh

Operation: TypeAlias = DrainedOp | ResumeMemoryOp | OpenGroupOp | CloseGroupOp

STILL_HELD = "requests, copies or storage work still hold cache blocks"


@attrs.frozen(kw_only=True, eq=False)
class DeviceOps:
    """Control thread; every call waits for the forward thread.

    The cache is forgotten in all tiers before weights change. Nothing runs and nothing is admitted then,
    no copy and no publication is open (`clear` says no otherwise), so nothing of the old weights can be
    published later; no version in the blocks' names is needed for that.
    """

    mesh: Mesh

    def carry_out(self, op: Operation, plane: DataPlane, *, clear: Callable[[], bool], restore: bool) -> str:
        """Returns "", or why nothing has changed.

        Args:
            clear: forgets the cache in all tiers; False: somebody holds a block.
            restore: a resume of the weights brings back those that were released.
        """
        match op:
            case ReleaseMemoryOp(tags=tags):
                if KV_CACHE in tags and not clear():
                    return STILL_HELD
                return self._agreed(plane.release_memory(tags))
            case ResumeMemoryOp(tags=tags):
                return self._agreed(plane.resume_memory(tags, restore))
            case UpdateWeightsOp():
                return self._update(op, plane, clear)
            case WeightVersionOp():
                return ""
            case OpenGroupOp(group=group):
                return self._agreed(plane.open_weights_group(group))
            case CloseGroupOp(name=name):
                return self._agreed(plane.close_weights_group(name))

    def _update(self, op: UpdateWeightsOp, plane: DataPlane, clear: Callable[[], bool]) -> str:
        """Flush, load beside, agree, commit: a member that could not load leaves all with the old weights."""
        if not clear():
            return f"update_weights: {STILL_HELD}; nothing was loaded"
        refusal = self._agreed(plane.load_weights(op.source))
        return plane.commit_weights(not refusal) or refusal

    def _agreed(self, refusal: str) -> str:
        """The first member's refusal, if any has one."""
        return next((text for text in self.mesh.gather(refusal) if text), "")
