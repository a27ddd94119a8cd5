"""The storage tier of a rank: what its pages depend on, taken from settings, specs and checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import assert_never, cast

import attrs

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.digest import config_digest, content_digest
from tokenspeed.collective.solo import SoloMesh
from tokenspeed.control.l3 import AgreedStorage
from tokenspeed.control.wakeup import MonotonicClock
from tokenspeed.errors import SettingsError, TokenspeedError
from tokenspeed.plane.operations import DiskWeights, GroupWeights, TensorWeights, WeightsSource
from tokenspeed.plane.ports import Clock, Mesh, Meter, Wakeup
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.plane.storage import HostBytes, StorageBackend
from tokenspeed.settings.model import Settings, StorageKind
from tokenspeed.storage.executor import StorageWorkers
from tokenspeed.storage.factory import group_schemas, host_regions, open_backend, open_storage
from tokenspeed.storage.identity import PayloadFacts, weights_over
from tokenspeed.telemetry.meters import NullMeter


@attrs.frozen(kw_only=True, eq=False)
class StorageNeeds:
    """Attributes:
    blocks, numerics: of the device build's `host_cache`.
    checkpoint_at: what the path of an update names.
    given: the part `storage`.
    """

    settings: Settings
    specs: DeviceSpecs
    blocks: tuple[HostBytes, ...]
    numerics: str
    checkpoint: Checkpoint
    checkpoint_at: Callable[[str], Checkpoint]
    given: StorageBackend | None

    @property
    def wanted(self) -> bool:
        return self.settings.storage.backend is not StorageKind.NONE or self.given is not None


def payload_facts(needs: StorageNeeds) -> PayloadFacts:
    return PayloadFacts(
        model=config_digest(needs.checkpoint.config),
        numerics=needs.numerics,
        dtype=needs.specs.dtype,
        page_tokens=needs.specs.page_tokens,
        groups=group_schemas(needs.specs.groups, needs.blocks),
        ranks=needs.settings.parallel.tensor,
        tenant=needs.settings.storage.namespace,
    )


def storage_parts(
    needs: StorageNeeds, wakeup: Wakeup, chosen: Mapping[str, object], lifetime: ExitStack
) -> Mapping[str, object]:
    """The control plane's part for storage; none where there is no storage. `lifetime` ends its workers.

    Args:
        chosen: parts of the control plane that are known already.
    Raises: SettingsError: no host tier, or the store cannot be opened. ModelError.
    """
    if not needs.wanted or "l3" in chosen:
        return {}
    clock = cast("Clock", chosen.get("clock") or MonotonicClock())
    meter = cast("Meter", chosen.get("meter") or NullMeter())
    mesh = cast("Mesh", chosen.get("mesh") or SoloMesh())
    workers = storage_workers(needs, clock=clock, meter=meter, wakeup=wakeup)
    lifetime.callback(workers.close)
    return {"l3": AgreedStorage(mesh=mesh, workers=workers)}


def storage_workers(needs: StorageNeeds, *, clock: Clock, meter: Meter, wakeup: Wakeup) -> StorageWorkers:
    """Raises: SettingsError: no host tier, or the store cannot be opened. ModelError."""
    if not needs.blocks:
        raise SettingsError("storage.backend: pages reach storage through the host tier; set cache.host_gib")
    settings = needs.settings.storage
    backend, checkpoint_at = open_backend(settings, needs.given), needs.checkpoint_at
    try:
        return open_storage(
            settings,
            payload_facts(needs),
            host_regions(needs.specs.groups, needs.blocks),
            backend,
            weights=content_digest(needs.checkpoint),
            weights_of=lambda source, over: identity_after(source, over, checkpoint_at),
            clock=clock,
            meter=meter,
            wakeup=wakeup,
        )
    except BaseException:
        backend.close()
        raise


def identity_after(source: WeightsSource, over: str, checkpoint_at: Callable[[str], Checkpoint]) -> str:
    """Identity of the weights that `source` has brought over those of identity `over`.

    By content, so that engines that were given the same weights share pages, whatever they call them. What
    cannot be looked at again is nobody else's.
    """
    match source:
        case DiskWeights(path=path):
            try:
                return content_digest(checkpoint_at(path))
            except (TokenspeedError, OSError):
                return secrets.token_hex(16)
        case TensorWeights(blobs=blobs):
            return weights_over(over, blobs)
        case GroupWeights():
            return secrets.token_hex(16)
        case other:
            assert_never(other)
