"""What the storage tier (L3) and its neighbours pass each other: host memory, a store's seam, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

HostBytes: TypeAlias = npt.NDArray[np.uint8]


@attrs.frozen(kw_only=True, eq=False)
class HostRegion:
    """Host-tier blocks of one cache group, as memory. Whoever keeps it keeps the memory.

    Attributes:
        blocks: uint8 ``[blocks, block_bytes]``, writable, each block in one run; block 0 is the null block.
        block_tokens: tokens that a block stands for.
    """

    blocks: HostBytes = attrs.field(repr=False)
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        return int(self.blocks.shape[1])


@runtime_checkable
class StorageBackend(Protocol):
    """A store of byte strings by key, called from several storage workers at once, never from a round.

    Keys are ``NAMESPACE/NAME``, both hexadecimal. A value is a frame with its own length and digest, which the
    workers check: a store need not. A missing value is no error; what is wrong with the store as a whole is
    raised as OSError, and costs the callers this batch and nothing else. A call may take for ever: the
    workers stop waiting for it.
    """

    def attach(self, memory: HostBytes) -> None:
        """All frames of one worker will lie in `memory`; called once a worker, before its first batch."""
        ...

    def exists(self, keys: Sequence[str]) -> list[bool]: ...

    def get(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        """Fill each frame; False: there is no value of exactly this length."""
        ...

    def put(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        """Store each frame, whole or not at all; one that is there already counts as stored."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Values that proved wrong."""
        ...

    def clear(self, namespace: str) -> None:
        """Nothing of `namespace` is found any more, by nobody."""
        ...

    def close(self) -> None: ...


@attrs.frozen(kw_only=True)
class StorageTraffic:
    """What storage workers did since they were last asked.

    Attributes:
        queried_tokens, hit_tokens: the token span of every key looked up, and of those found; groups may cover
            the same positions, so these are no prompt tokens (KM-9).
        fetched, stored: blocks whose bytes arrived, whole and checked.
        failed: blocks that a GET or PUT did not move; `damaged`: those of them with a wrong length or digest.
        late: operations that were given up at their time limit.
        read_s, write_s: seconds that workers spent in GETs and PUTs.
        failing: the store is taken to be down, for reading or for writing.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    fetched: int = 0
    stored: int = 0
    failed: int = 0
    damaged: int = 0
    late: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    failing: bool = False
