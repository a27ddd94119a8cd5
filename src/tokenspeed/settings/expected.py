"""What a key takes, said once: the words of errors and of the reference, and the bounds of the schema."""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterable, Mapping

from tokenspeed.settings.keys import alternatives

WORDS: Mapping[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
COMPARED = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def expected(kind: object, validator: object = None) -> str:
    """What a key of this type takes, e.g. ``a whole number from 0 to 65535``; null is not mentioned.

    Args:
        kind: the annotated type; of a union, the member that is not None counts.
        validator: attrs' own; one of another kind has words of its own.
    """
    inner = next(member for member in alternatives(kind) if member is not type(None))
    limits = bounds(validator)
    if isinstance(options := limits.get("enum"), list):
        return one_of(options)
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return one_of(member.value for member in inner)
    if typing.get_origin(inner) is tuple:
        item = typing.get_args(inner)[0]
        return "a list of text" if item is str else f"a list of {expected(item).removeprefix('one of ')}"
    return WORDS[inner] + _within(limits)


def one_of(words: Iterable[object]) -> str:
    """``one of a, b, c``."""
    return f"one of {', '.join(str(word) for word in words)}"


def bounds(validator: object) -> dict[str, object]:
    """What attrs' own validators say, in the words of JSON schema; a validator of another kind says nothing here."""
    found: dict[str, object] = {}
    for part in getattr(validator, "_validators", ()):  # several in a row
        found.update(bounds(part))
    if hasattr(validator, "validator"):  # optional(...)
        found.update(bounds(validator.validator))
    if hasattr(validator, "compare_op"):  # ge, gt, le, lt
        found[COMPARED[validator.compare_op]] = getattr(validator, "bound", None)
    if hasattr(validator, "options"):  # in_
        found["enum"] = list(validator.options)
    if hasattr(validator, "min_length"):
        found["minLength"] = validator.min_length
    if hasattr(validator, "pattern"):  # matches_re
        found["pattern"] = validator.pattern.pattern
    return found


def _within(limits: Mapping[str, object]) -> str:
    if "pattern" in limits:
        return f" that matches {limits['pattern']}"
    if limits.get("minLength") == 1:
        return ", not empty"
    low, above, high = limits.get("minimum"), limits.get("exclusiveMinimum"), limits.get("maximum")
    if low is not None and high is not None:
        return f" from {_plain(low)} to {_plain(high)}"
    floor = f" above {_plain(above)}" if above is not None else f", at least {_plain(low)}" if low is not None else ""
    ceiling = f"at most {_plain(high)}" if high is not None else ""
    return f"{floor} and {ceiling}" if floor and ceiling else floor or (f", {ceiling}" if ceiling else "")


def _plain(number: object) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
