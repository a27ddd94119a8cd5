"""What a frontend asks of an engine beside requests and pauses: memory, weights, questions, recordings."""

from __future__ import annotations

import enum
from typing import TypeAlias

import attrs

WEIGHTS, KV_CACHE = "weights", "kv_cache"
MEMORY_TAGS: tuple[str, ...] = (WEIGHTS, KV_CACHE)
"""Regions of device memory that can be given back, each by itself."""

FIRST_WEIGHT_VERSION = "default"
"""Of the weights that an engine starts with."""


@attrs.frozen(kw_only=True)
class ReleaseMemoryOp:
    """Give regions of memory back to the machine.

    Attributes:
        tags: some of :data:`MEMORY_TAGS`.
        restore: the resume brings the weights back; False: they are forgotten, and the engine serves
            nothing until an update brought others.
    """

    call_id: int
    tags: tuple[str, ...] = MEMORY_TAGS
    restore: bool = True


@attrs.frozen(kw_only=True)
class ResumeMemoryOp:
    """Take released regions back; no tags: all that are released (CP-20)."""

    call_id: int
    tags: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class DiskWeights:
    """A checkpoint on this machine, in any form in which a model can be named at start."""

    path: str


@attrs.frozen(kw_only=True)
class TensorWeights:
    """Tensors by their Hugging Face names, each blob a safetensors file; others keep their values."""

    blobs: tuple[bytes, ...] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class GroupWeights:
    """Tensors that member 0 of an update group broadcasts, in this order; others keep their values."""

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


WeightsSource: TypeAlias = DiskWeights | TensorWeights | GroupWeights


@attrs.frozen(kw_only=True)
class UpdateWeightsOp:
    """Serve with other weights.

    Attributes:
        version: stamped on every answer from then on; None: a number that rises by one each update.
        abort: end running requests instead of waiting for them.
    """

    call_id: int
    source: WeightsSource
    version: str | None = None
    abort: bool = False


@attrs.frozen(kw_only=True)
class WeightVersionOp:
    """Call the weights in force `version`; their values stay."""

    call_id: int
    version: str
    abort: bool = False


@attrs.frozen(kw_only=True)
class WeightsGroup:
    """How this engine joins the processes that broadcast weights to it.

    Attributes:
        address: ``host:port`` of member 0's store.
        rank: of this engine; 0 is the trainer.
    """

    name: str
    address: str
    rank: int
    size: int
    backend: str = "gloo"
    timeout_s: float = 60.0


@attrs.frozen(kw_only=True)
class OpenGroupOp:
    call_id: int
    group: WeightsGroup


@attrs.frozen(kw_only=True)
class CloseGroupOp:
    call_id: int
    name: str


class Question(enum.Enum):
    """What can be asked of an engine's state; the reply's message is a JSON object."""

    PAUSED = "is_paused"
    SLEEPING = "is_sleeping"
    WEIGHT_VERSION = "get_weight_version"
    SERVER = "server_info"
    HEALTH = "health"
    STATE = "get_internal_state"


@attrs.frozen(kw_only=True)
class AskOp:
    call_id: int
    question: Question


@attrs.frozen(kw_only=True)
class StartProfileOp:
    """Record the device's work.

    Attributes:
        path: a folder, or the name of a ``.json`` file.
        steps: forwards to record; None: until it is stopped.
        skip: forwards to let pass before the first one that is recorded.
        wants: what must be recorded, in the words of torch's profiler; refused if this build cannot (KM-46).
    """

    call_id: int
    path: str
    steps: int | None = None
    skip: int = 0
    wants: tuple[str, ...] = ("CPU",)


@attrs.frozen(kw_only=True)
class StopProfileOp:
    call_id: int


DrainedOp: TypeAlias = ReleaseMemoryOp | UpdateWeightsOp | WeightVersionOp
"""Carried out once nothing runs and nobody holds a page."""

ProfileOp: TypeAlias = StartProfileOp | StopProfileOp
