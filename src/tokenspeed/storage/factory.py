"""Sets storage up, once, when the engine starts: from host memory and plain facts, without a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.plane.operations import WeightsSource
from tokenspeed.plane.ports import Clock, Meter, Wakeup
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.storage import HostBytes, HostRegion, StorageBackend
from tokenspeed.settings.choices import StorageKind
from tokenspeed.settings.storage import StorageSettings
from tokenspeed.storage.executor import MOST_READS, MOST_WRITES, StorageWorkers, WeightsInForce
from tokenspeed.storage.files import open_files
from tokenspeed.storage.identity import GroupSchema, PayloadFacts, namespace_of, schema_of
from tokenspeed.storage.jobs import Desk
from tokenspeed.storage.mooncake import open_mooncake
from tokenspeed.storage.pages import Pages
from tokenspeed.storage.patience import Patience

log = logging.getLogger(__name__)

GIB = 1 << 30


def group_schemas(groups: Sequence[CacheGroupSpec], blocks: Sequence[HostBytes]) -> tuple[GroupSchema, ...]:
    """`blocks`: by group, the host tier's memory, uint8 ``[blocks, layers, layer_bytes]``."""
    return tuple(
        GroupSchema(
            name=spec.name,
            kind=spec.kind,
            block_tokens=spec.block_tokens,
            window_tokens=spec.window_tokens,
            layers=memory.shape[1],
            layer_bytes=memory.shape[2],
        )
        for spec, memory in zip(groups, blocks, strict=True)
    )


def host_regions(groups: Sequence[CacheGroupSpec], blocks: Sequence[HostBytes]) -> tuple[HostRegion, ...]:
    """The same memory with a block in one dimension. Raises: InvariantBroken: a block is not one run of bytes."""
    regions = []
    for spec, memory in zip(groups, blocks, strict=True):
        flat = memory.reshape(memory.shape[0], -1)
        if not np.may_share_memory(flat, memory):
            raise InvariantBroken("a host block with gaps", shape=memory.shape, strides=memory.strides)
        regions.append(HostRegion(blocks=flat, block_tokens=spec.block_tokens))
    return tuple(regions)


def open_backend(settings: StorageSettings, given: StorageBackend | None) -> StorageBackend:
    """Raises: SettingsError: the store that the settings name cannot be opened, or is not the one given."""
    if (given is not None) != (settings.backend is StorageKind.PART):
        has = "none" if given is None else f"a {type(given).__name__}"
        raise SettingsError(
            f"storage.backend: {settings.backend.value}, while the part `storage` is {has}; "
            f"a part goes with `part`, and `part` needs one"
        )
    if given is not None:
        return given
    if settings.backend is StorageKind.MOONCAKE:
        return open_mooncake(settings)
    if settings.path is None:
        raise SettingsError("storage.path: files need a folder; set it")
    return open_files(Path(settings.path).expanduser(), max_bytes=int(settings.max_gib * GIB))


def open_storage(
    settings: StorageSettings,
    facts: PayloadFacts,
    regions: tuple[HostRegion, ...],
    backend: StorageBackend,
    *,
    weights: str,
    weights_of: Callable[[WeightsSource, str], str],
    clock: Clock,
    meter: Meter,
    wakeup: Wakeup,
) -> StorageWorkers:
    """An executor with its threads running; `close` ends them and closes `backend`.

    Args:
        weights: identity of those the engine starts with.
        weights_of: see `StorageWorkers`.
    Raises: SettingsError: the store does not take the workers' memory.
    """
    schema = schema_of(facts)
    namespace = namespace_of(schema, weights)
    desk = Desk(tell=wakeup.set, most_reads=MOST_READS, most_writes=MOST_WRITES)
    workers = StorageWorkers(
        pages=Pages(regions=regions, backend=backend, desk=desk),
        desk=desk,
        clock=clock,
        meter=meter,
        reading=Patience(what="reading", clock=clock),
        writing=Patience(what="writing", clock=clock),
        schema=schema,
        weights=WeightsInForce(identity=weights, namespace=namespace),
        weights_of=weights_of,
        timeout_s=settings.timeout_s,
        drain_s=settings.shutdown_s,
    )
    try:
        workers.start(settings.threads)
    except OSError as fault:
        raise SettingsError(f"storage.backend: {settings.backend.value} cannot be used: {fault}") from fault
    log.info("storage: %s, namespace %s", settings.backend.value, namespace)
    return workers
