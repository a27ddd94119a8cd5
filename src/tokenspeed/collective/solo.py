"""The mesh of a rank that is alone: every collective is the value itself (CG-4)."""

from __future__ import annotations

from typing import TypeVar

import attrs

M = TypeVar("M")


@attrs.frozen(eq=False)
class SoloMesh:
    """`plane.ports.Mesh` of one member. No socket, no thread, no copy."""

    @property
    def size(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return 0

    def share(self, value: M) -> M:
        return value

    def gather(self, value: M) -> tuple[M, ...]:
        return (value,)

    def close(self) -> None:
        return None
