"""Logits processors by name, as the settings list them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from tokenspeed.device.sampling.processors import LogitsProcessor
from tokenspeed.errors import SettingsError

GROUP = "tokenspeed.logits_processors"
KEY = "sampling.logits_processors"


def load_processors(wanted: Iterable[str]) -> Mapping[str, LogitsProcessor]:
    """``NAME`` of an entry point of :data:`GROUP`, or ``NAME=package.module:attribute``; imported at once.

    Raises: SettingsError: unknown, not importable, or nothing that can be called as a `LogitsProcessor` is.
    """
    made: dict[str, LogitsProcessor] = {}
    for text in wanted:
        name, _, place = text.partition("=")
        found = _imported(name, place) if place else _registered(name)
        if not isinstance(found, LogitsProcessor):
            raise SettingsError(f"{KEY}: {name} is a {type(found).__name__}, not a callable that makes a processor")
        if fault := _refusal(found):
            raise SettingsError(
                f"{KEY}: {name} cannot be called with argument, history, prompt_len and vocab_size: {fault}"
            )
        made[name] = found
    return MappingProxyType(made)


def _refusal(processor: LogitsProcessor) -> str:
    """Why a request could not make use of it, or ""; a callable without a signature is taken at its word."""
    try:
        signature = inspect.signature(processor)
    except ValueError:
        return ""
    try:
        signature.bind(argument="null", history=None, prompt_len=0, vocab_size=0)
    except TypeError as fault:
        return str(fault)
    return ""


def names_of(wanted: Iterable[str]) -> tuple[str, ...]:
    """What requests call them."""
    return tuple(text.partition("=")[0] for text in wanted)


def _imported(name: str, place: str) -> object:
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as no:
        raise SettingsError(f"{KEY}: {name}: {no}") from no


def _registered(name: str) -> object:
    registered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in registered:
        known = ", ".join(sorted(registered)) or "none"
        raise SettingsError(
            f"{KEY}: no processor is called {name!r}; there are: {known}, or NAME=package.module:attribute"
        )
    try:
        return registered[name].load()
    except (ImportError, AttributeError) as no:
        raise SettingsError(f"{KEY}: {name}: {no}") from no
