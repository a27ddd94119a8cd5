"""Typed reads of a checkpoint's keys; a fault names file, key, value and what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import attrs

from tokenspeed.errors import ModelError

JsonObject: TypeAlias = Mapping[str, object]

_MOST = 1 << 40


@attrs.frozen(kw_only=True)
class Facts:
    """One object of keys and values.

    Attributes:
        where: the file, for messages.
        prefix: put before every key, in look-ups and in messages.
    """

    raw: Mapping[str, object]
    where: str
    prefix: str = ""

    def fail(self, key: str, value: object, allowed: str) -> ModelError:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
        return ModelError(f"{self.where}: {self.prefix}{key} is {shown}; {allowed}")

    def get(self, key: str) -> object:
        """The value as it stands; None if missing."""
        return self.raw.get(f"{self.prefix}{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a list with one equal entry a layer counts as that number."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, (tuple, list)) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or not 0 < value < _MOST:
            raise self.fail(key, value, "a positive whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.fail(key, value, "a positive number is needed")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false is needed")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.get(key)
        many = list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if any(type(one) is not int or not 0 <= one < _MOST for one in many):
            raise self.fail(key, value, "a token id or a list of them is needed")
        return tuple(one for one in many if isinstance(one, int))

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, value, "a text is needed")
        return value


def read_json(path: Path) -> dict[str, object]:
    """Parse a file that holds one JSON object.

    Raises: ModelError: missing, unreadable, not JSON, or not an object.
    """
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as fault:
        raise ModelError(f"{path}: the file is missing") from fault
    except (OSError, ValueError, RecursionError) as fault:
        raise ModelError(f"{path}: cannot be read as JSON: {fault}") from fault
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds {type(raw).__name__}; a JSON object is needed")
    return raw


def read_json_if_there(path: Path) -> dict[str, object]:
    """Like :func:`read_json`; a missing file is an empty object."""
    return read_json(path) if path.exists() else {}
