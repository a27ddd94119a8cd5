"""Made-up wheels, and an index of them that counts what it is asked."""

from __future__ import annotations

import base64
import hashlib
import shutil
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.wheels import Wheel, sha256_of
from tokenspeed.errors import ModelError


def write_wheel(
    folder: Path,
    files: Mapping[str, bytes],
    *,
    name: str = "llm-demo",
    version: str = "1.0",
    recorded: Mapping[str, bytes] | None = None,
    requires: Sequence[str] = (),
) -> Path:
    """A wheel holding `files`; its RECORD speaks of `recorded` instead, where given."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    own = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in {**files, **own, **(recorded or {})}.items()
    ]
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in {**files, **own}.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]))
    return wheel


@attrs.define(eq=False)
class WheelShelf:
    """A WheelFetcher over files, newest version last.

    Attributes:
        others: wheels of other packages, by requirement (``NAME==VERSION``).
        sha256: what the index claims; None: the truth.
        gate: a fetch waits for it; set it beforehand to let fetches through.
        fail: raised in the middle of a fetch.
    """

    wheels: dict[str, Path]
    others: dict[str, Path] = attrs.field(factory=dict[str, Path])
    name: str = "llm-demo"
    sha256: str | None = None
    fail: BaseException | None = None
    gate: threading.Event = attrs.field(factory=threading.Event)
    started: threading.Event = attrs.field(factory=threading.Event)
    fetched: list[str] = attrs.field(factory=list[str])

    def find(self, requirement: str) -> Wheel:
        name, _, version = requirement.partition("==")
        if requirement in self.others:
            file = self.others[requirement]
            return Wheel(name=name, version=version, url=file.as_uri(), sha256=sha256_of(file))
        version = version or list(self.wheels)[-1]
        if name != self.name or version not in self.wheels:
            raise ModelError(f"no wheel for {requirement}")
        file = self.wheels[version]
        return Wheel(name=name, version=version, url=file.as_uri(), sha256=self.sha256 or sha256_of(file))

    def fetch(self, wheel: Wheel, folder: Path, progress: Progress) -> Path:
        self.fetched.append(wheel.version)
        self.started.set()
        assert self.gate.wait(timeout=30)
        file = self.others.get(f"{wheel.name}=={wheel.version}") or self.wheels[wheel.version]
        target = folder / file.name
        if self.fail is not None:
            target.write_bytes(b"half")
            raise self.fail
        shutil.copy(file, target)
        progress.step("copied", 1, 1)
        return target


def shelf(*wheels: Path) -> WheelShelf:
    """An index of `wheels` that answers at once."""
    found = WheelShelf(wheels={wheel.name.split("-")[1]: wheel for wheel in wheels})
    found.gate.set()
    return found
