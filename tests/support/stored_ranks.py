"""Real ranks with a storage tier, their rounds run by hand."""

from __future__ import annotations

import time

import attrs
from ops_rig import TIMEOUT_S, HandRank, tiny_settings

from tokenspeed.settings.model import CacheSettings, Settings, StorageKind, StorageSettings

PROMPT = [(at * 37) % 211 + 3 for at in range(89)]
WHOLE_PAGES = 80
"""Tokens of PROMPT that a hit may cover."""


def stored_settings(
    folder: object = None, *, overlap: bool = True, model: str = "tiny-llama", **storage: object
) -> Settings:
    """`folder`: None for the part `storage`."""
    kind = StorageKind.PART if folder is None else StorageKind.FILES
    base = StorageSettings(backend=kind, path=None if folder is None else str(folder), timeout_s=TIMEOUT_S)
    settings = tiny_settings(overlap=overlap, pool_tokens=1024)
    return attrs.evolve(
        settings,
        model=attrs.evolve(settings.model, source=f"random:{model}"),
        cache=CacheSettings(page_tokens=16, host_gib=0.01),
        storage=attrs.evolve(base, **storage),  # type: ignore[arg-type]
    )


def come_to_rest(rank: HandRank) -> None:
    """Rounds until nothing is being copied, stored or about to be."""
    loop = rank.engine.loop
    until = time.monotonic() + TIMEOUT_S
    while rank.round() or not loop.scheduler.can_clear_cache() or loop.l3.open or _offered(rank):
        assert time.monotonic() < until, "storage does not come to rest"
        rank.wakeup.wait(0.02)


def _offered(rank: HandRank) -> int:
    return len(rank.engine.loop.scheduler.storage.keep.state.offered)  # type: ignore[attr-defined]
