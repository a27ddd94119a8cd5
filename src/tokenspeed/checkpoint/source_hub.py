"""Models of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.resolved import CheckpointKind, Located
from tokenspeed.errors import ModelError

_FORM = re.compile(r"(?:hf:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<rev>[\w./-]+))?", re.ASCII)
_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
_UNWANTED = ("*/*", "consolidated*.safetensors")
"""Weights in folders, or named like this, are further copies of the same."""


@attrs.frozen(kw_only=True, eq=False)
class HubSource:
    """``hf:ORG/NAME[@REVISION]``.

    Attributes:
        folder: the hub library's cache; None: its own, which other tools share.
        endpoint: address of the hub; None: the library's (``HF_ENDPOINT``).
        offline: use what the cache holds.
    """

    folder: Path | None = None
    endpoint: str | None = None
    offline: bool = False

    def claims(self, source: str) -> bool:
        return source.startswith("hf:") or _FORM.fullmatch(source) is not None

    def locate(self, source: str, progress: Progress) -> Located:
        form = _FORM.fullmatch(source)
        if form is None:
            raise ModelError(f"model {source}: the form is hf:ORG/NAME or hf:ORG/NAME@REVISION")
        path = self._snapshot(source, form["repo"], form["rev"], progress)
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model {source}: the repository has no config.json; repositories in the safetensors layout are"
                " supported, of a GGUF repository download one file and give its path"
            )
        return Located(kind=CheckpointKind.SAFETENSORS, path=path, name=form["repo"], hub=True)

    def _snapshot(self, source: str, repo: str, revision: str | None, progress: Progress) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            found = snapshot_download(
                repo,
                revision=revision,
                cache_dir=self.folder,
                endpoint=self.endpoint,
                local_files_only=self.offline,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
                tqdm_class=_reporting(progress),
            )
        except GatedRepoError as fault:
            raise ModelError(
                f"model {source}: access to {repo} has to be asked for; accept its terms there, then set HF_TOKEN"
            ) from fault
        except RepositoryNotFoundError as fault:
            here = "" if source.startswith("hf:") else f" and there is no folder {source} here"
            raise ModelError(
                f"model {source}: the hub knows no repository {repo}{here}; check the name,"
                " and set HF_TOKEN if it is private"
            ) from fault
        except RevisionNotFoundError as fault:
            raise ModelError(f"model {source}: {repo} has no revision {revision}") from fault
        except LocalEntryNotFoundError as fault:
            raise ModelError(self._not_cached(source, fault)) from fault
        except (HfHubHTTPError, OSError, ValueError) as fault:
            raise ModelError(f"model {source}: the download of {repo} failed: {fault}") from fault
        return Path(str(found))

    def _not_cached(self, source: str, fault: Exception) -> str:
        where = self.folder or "the hub library's cache"
        if self.offline or os.environ.get("HF_HUB_OFFLINE"):
            return (
                f"model {source}: the network is switched off (model.offline or HF_HUB_OFFLINE) and {where} does not"
                " hold the whole model; run once with the network, or give a path"
            )
        return f"model {source}: the hub cannot be reached and {where} does not hold the whole model: {fault}"


def _reporting(progress: Progress) -> type[Any]:
    """A bar class for the hub library that draws nothing and reports bytes to `progress`."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            # The library runs two byte bars side by side; one is enough.
            self.reported = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.reported:
                progress.step("downloading", int(self.n), int(self.total or 0))

    return Reporting
