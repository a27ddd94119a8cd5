"""The check of the capture contract: what a queued operation may carry, and that it stays (DP-49, DP-50).

Arguments of queued operations are the only carrier of information to the data plane. They are plain
values that nobody can change after queueing: numbers, text, bytes, enum members, tuples of such,
frozen values of the plane, and numpy arrays that are read-only down to the memory they view. There
is no entry in the list for a tensor, a list, a callable or a live control object. A seal over the
arguments, made when they are queued, finds what was changed all the same, through memory that is
shared or made writable again. `device.launch_check` does likewise for what the forward thread makes of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken

ENV_SWITCH = "TOKENSPEED_CAPTURE_CHECK"
_SCALARS = (int, float, str, bytes, enum.Enum, type(None))
_VALUE_ROOM = "tokenspeed.plane."


class CaptureCheck(Protocol):
    """Looks at the arguments of an operation before they are queued."""

    def check(self, operation: str, argument: object) -> None:
        """Raises InvariantBroken: `argument` holds something that must not be queued."""
        ...

    def seal(self, operation: str, argument: object) -> Seal:
        """Take down what `argument`, which has passed `check`, says now."""
        ...


class Seal(Protocol):
    """What an argument said when it was queued."""

    def verify(self, when: str) -> None:
        """Raises InvariantBroken: the argument says something else now; `when` it was looked at."""
        ...


@attrs.frozen(eq=False)
class NoSeal:
    def verify(self, when: str) -> None:
        return None


NO_SEAL = NoSeal()


@attrs.frozen(eq=False)
class DigestSeal:
    """A digest of every value below the argument, array contents included."""

    operation: str
    argument: object
    digest: int

    def verify(self, when: str) -> None:
        if _digest(self.argument) != self.digest:
            raise InvariantBroken("an argument was changed after it was queued", operation=self.operation, found=when)


@attrs.frozen(eq=False)
class Trusting:
    """Costs nothing; for production."""

    def check(self, operation: str, argument: object) -> None:
        return None

    def seal(self, operation: str, argument: object) -> Seal:
        return NO_SEAL


@attrs.frozen(eq=False)
class Strict:
    """Walks every argument against the allow-list."""

    def check(self, operation: str, argument: object) -> None:
        fault = _fault(argument, "argument")
        if fault:
            raise InvariantBroken("an operation was given something mutable", operation=operation, found=fault)

    def seal(self, operation: str, argument: object) -> Seal:
        return DigestSeal(operation, argument, _digest(argument))


def capture_check(environment: Mapping[str, str], *, debug: bool = False) -> CaptureCheck:
    """`Strict` where the settings say debug or the environment has TOKENSPEED_CAPTURE_CHECK=1."""
    return Strict() if debug or environment.get(ENV_SWITCH) == "1" else Trusting()


def _digest(value: object) -> int:
    """Of a value on the allow-list."""
    if isinstance(value, tuple):
        return hash(tuple(_digest(item) for item in value))
    if isinstance(value, np.ndarray):
        return hash((value.shape, value.tobytes()))
    kind = type(value)
    if attrs.has(kind):
        return hash(tuple(_digest(getattr(value, field.name)) for field in attrs.fields(kind)))
    return hash(value)


def _fault(value: object, path: str) -> str:
    """Where below `value` the first object outside the allow-list is; "" if there is none."""
    if isinstance(value, _SCALARS):
        return ""
    if isinstance(value, tuple):
        names: tuple[str, ...] | None = getattr(value, "_fields", None)
        places = (f".{name}" for name in names) if names else (f"[{i}]" for i in range(len(value)))
        faults = (_fault(item, path + place) for item, place in zip(value, places, strict=True))
        return next(filter(None, faults), "")
    if isinstance(value, np.ndarray):
        return "" if _read_only(value) else f"{path}: a writable array"
    kind = type(value)
    if kind.__module__.startswith(_VALUE_ROOM) and attrs.has(kind) and attrs.inspect(kind).is_frozen:
        fields = (_fault(getattr(value, field.name), f"{path}.{field.name}") for field in attrs.fields(kind))
        return next(filter(None, fields), "")
    return f"{path}: a {kind.__module__}.{kind.__qualname__}"


def _read_only(array: object) -> bool:
    """Whether neither `array` nor what it is a view of can be written; object arrays never pass."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable or array.dtype.hasobject:
            return False
        array = array.base
    return array is None or isinstance(array, bytes)
