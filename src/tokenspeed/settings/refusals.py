"""Values that are well-formed but that this build cannot act on, in one table.

A key stays in the tree before its feature is built, so that files do not change when it is; setting
it is refused by name rather than ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from tokenspeed.errors import SettingsError
from tokenspeed.settings.choices import Executor, GrammarFill
from tokenspeed.settings.keys import Path, dotted
from tokenspeed.settings.model import (
    Backend,
    Retraction,
    Settings,
    SimulatedSettings,
    StorageKind,
    StorageSettings,
    Transport,
    WritePolicy,
)


@attrs.frozen(kw_only=True)
class Refusal:
    """`path` is the key to blame; `applies` looks at the whole tree, since some keys exclude each other."""

    path: tuple[str, ...]
    applies: Callable[[Settings], bool]
    reason: str


def _refuse(key: str, applies: Callable[[Settings], bool], reason: str) -> Refusal:
    return Refusal(path=tuple(key.split(".")), applies=applies, reason=reason)


def _refuse_unless_simulated(name: str, default: object) -> Refusal:
    return _refuse(
        f"simulated.{name}",
        lambda s: s.device.backend is not Backend.SIMULATED and getattr(s.simulated, name) != default,
        "it describes the simulated device; set device.backend to simulated",
    )


def _refuse_unless_stored(name: str, default: object, kinds: tuple[StorageKind, ...]) -> Refusal:
    wanted = " or ".join(kind.value for kind in kinds)
    return _refuse(
        f"storage.{name}",
        lambda s: s.storage.backend not in kinds and getattr(s.storage, name) != default,
        f"it is for storage.backend {wanted}, which is not in use",
    )


def _storage_kinds(name: str) -> tuple[StorageKind, ...]:
    """Whose key it is."""
    if name.startswith("mooncake_"):
        return (StorageKind.MOONCAKE,)
    if name == "path":
        return (StorageKind.FILES,)
    if name == "max_gib":
        return (StorageKind.FILES, StorageKind.MOONCAKE)
    return (StorageKind.FILES, StorageKind.MOONCAKE, StorageKind.PART)


REFUSALS: tuple[Refusal, ...] = (
    _refuse("parallel.tensor", lambda s: s.parallel.tensor > 1, "this build serves one rank; leave it at 1"),
    _refuse("parallel.pipeline", lambda s: s.parallel.pipeline > 1, "this build serves one rank; leave it at 1"),
    _refuse("parallel.data", lambda s: s.parallel.data > 1, "this build serves one rank; leave it at 1"),
    *(_refuse_unless_simulated(field.name, field.default) for field in attrs.fields(SimulatedSettings)),
    _refuse(
        "cache.host_gib",
        lambda s: s.cache.host_gib > 0 and not s.cache.prefix,
        "blocks of the host tier are found by their prefix; set cache.prefix to true",
    ),
    _refuse(
        "cache.write_policy",
        lambda s: s.cache.write_policy is not WritePolicy.WRITE_THROUGH and not s.cache.host_gib,
        "nothing is written without a host tier; set cache.host_gib",
    ),
    _refuse(
        "cache.images",
        lambda s: s.cache.images > 0 and not s.cache.host_gib,
        "the full blocks of an image are kept in the host tier; set cache.host_gib",
    ),
    _refuse(
        "cache.images",
        lambda s: s.cache.images > 0 and Retraction.SNAPSHOT not in s.scheduler.retraction,
        "no image is taken unless scheduler.retraction has snapshot",
    ),
    *(
        _refuse_unless_stored(field.name, field.default, _storage_kinds(field.name))
        for field in attrs.fields(StorageSettings)
        if field.name != "backend"
    ),
    _refuse(
        "storage.backend",
        lambda s: s.storage.backend is not StorageKind.NONE and not s.cache.host_gib,
        "pages reach storage through the host tier; set cache.host_gib",
    ),
    _refuse(
        "storage.backend",
        lambda s: s.storage.backend is not StorageKind.NONE and s.parallel.pipeline > 1,
        "storage serves one pipeline stage; set parallel.pipeline to 1",
    ),
    _refuse(
        "storage.backend",
        lambda s: s.storage.backend is not StorageKind.NONE and s.device.backend is Backend.SIMULATED,
        "a simulated device computes no KV that could be kept",
    ),
    _refuse(
        "storage.path",
        lambda s: s.storage.backend is StorageKind.FILES and s.storage.path is None,
        "files need a folder; set it",
    ),
    _refuse(
        "grammar.fill",
        lambda s: s.grammar.fill is GrammarFill.FORWARD and s.device.executor is Executor.FUTURES,
        "a forward of the futures executor cannot fill masks itself; use auto or eager",
    ),
    _refuse(
        "grammar.fill",
        lambda s: s.grammar.fill is GrammarFill.FORWARD and s.device.backend is not Backend.CPU,
        "only a forward on the CPU can fill masks itself; use auto or eager",
    ),
    _refuse(
        "wire.transport",
        lambda s: s.wire.transport is Transport.MEMORY,
        "the processes of a deployment speak zmq; in one process, tokenspeed.Engine is in memory by itself",
    ),
)


def refused(settings: Settings) -> Iterator[tuple[Path, str]]:
    """(path, reason) of every value that this build cannot act on."""
    for refusal in REFUSALS:
        if refusal.applies(settings):
            yield refusal.path, refusal.reason


def refuse(settings: Settings) -> None:
    """For settings that were not loaded but built in Python.

    Raises: SettingsError: every refused key, one a line.
    """
    lines = [f"settings: {dotted(path)}: {reason}" for path, reason in refused(settings)]
    if lines:
        raise SettingsError("\n".join(lines))
