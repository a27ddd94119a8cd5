"""Plans as plain values, to compare and to hash."""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.plan import ExecutionPlan


def described(plan: ExecutionPlan) -> tuple[object, ...]:
    """A plan as nested tuples, for comparison."""

    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            return (str(value.dtype), tuple(value.tolist()))
        if attrs.has(type(value)):
            return tuple(plain(part) for part in attrs.astuple(value, recurse=False))
        if isinstance(value, tuple):
            return tuple(plain(part) for part in value)
        return value

    return tuple(plain(part) for part in plan)
