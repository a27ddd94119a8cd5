"""An in-memory mesh of N ranks, for loops that run on threads of one process."""

from __future__ import annotations

import threading
from typing import TypeVar

import attrs

M = TypeVar("M")


@attrs.define(eq=False)
class MeshRoom:
    """Shared by the members: one slot each, and a barrier that everyone passes twice a collective."""

    slots: list[object]
    barrier: threading.Barrier


@attrs.frozen(kw_only=True, eq=False)
class MemoryMesh:
    """`Mesh` over a barrier; a member that stays away makes the others raise after `timeout_s`."""

    rank: int
    room: MeshRoom
    timeout_s: float = 10.0

    @property
    def size(self) -> int:
        return len(self.room.slots)

    def share(self, value: M) -> M:
        return self.gather(value)[0]

    def gather(self, value: M) -> tuple[M, ...]:
        self.room.slots[self.rank] = value
        self.room.barrier.wait(self.timeout_s)
        values = tuple(self.room.slots)
        self.room.barrier.wait(self.timeout_s)
        return values  # type: ignore[return-value]  # every member put an M

    def close(self) -> None:
        self.room.barrier.abort()


def memory_mesh(size: int) -> tuple[MemoryMesh, ...]:
    """One mesh member for each of `size` ranks."""
    room = MeshRoom(slots=[None] * size, barrier=threading.Barrier(size))
    return tuple(MemoryMesh(rank=rank, room=room) for rank in range(size))
