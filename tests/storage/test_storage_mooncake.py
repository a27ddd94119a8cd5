"""Mooncake's store as a backend: over a stand-in for its calls, and over a master of its own where it is installed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
from files_writer import sealed
from storage_rig import storing

from tokenspeed.errors import SettingsError
from tokenspeed.settings.model import StorageKind, StorageSettings
from tokenspeed.storage.frame import intact
from tokenspeed.storage.mooncake import MooncakeBackend, open_mooncake

NOT_FOUND = -704


@attrs.define(eq=False)
class StandIn:
    """Keeps values as Mooncake does; `down`: every call gives a fault."""

    values: dict[str, bytes] = attrs.field(factory=dict)
    registered: list[tuple[int, int]] = attrs.field(factory=list)
    down: bool = False

    def setup(self, *_: object) -> int:
        return -1 if self.down else 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered.append((buffer_ptr, size))
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [-1 if self.down else int(key in self.values) for key in keys]

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        codes = []
        for key, address, size in zip(keys, buffer_ptrs, sizes, strict=True):
            value = self.values.get(key, b"")
            fits = not self.down and value and len(value) <= size
            assert any(begin <= address and address + size <= begin + room for begin, room in self.registered)
            if fits:
                ctypes.memmove(address, value, len(value))
            codes.append(len(value) if fits else NOT_FOUND)
        return codes

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        if self.down:
            return [-1] * len(keys)
        for key, address, size in zip(keys, buffer_ptrs, sizes, strict=True):
            self.values[key] = ctypes.string_at(address, size)
        return [0] * len(keys)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [0 if self.values.pop(key, None) else NOT_FOUND for key in keys]

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        if self.down:
            return -1
        gone = [key for key in self.values if re.search(regex_pattern, key)]
        for key in gone:
            del self.values[key]
        return len(gone)

    def health_check(self) -> int:
        return 2 if self.down else 0

    def close(self) -> int:
        return 0


def test_pages_go_to_mooncake_and_back_and_faults_of_it_are_misses() -> None:
    store = StandIn()
    with storing(MooncakeBackend(store=store)) as rig:
        names = ["a" * 16, "b" * 16]
        rig.fill(1, 1)
        rig.fill(2, 2)
        assert rig.put(names, [1, 2]) == (True, True)
        assert rig.query([*names, "c" * 16]) == (True, True, False)
        assert rig.get([*names, "c" * 16], [11, 12, 13]) == (True, True, False)
        assert [rig.content(block) for block in (11, 12, 13)] == [{1}, {2}, {0}]
        key = min(store.values)
        store.values[key] = store.values[key][:50]
        assert rig.get(names, [21, 22]) == (False, True)
        store.down = True
        for _ in range(3):
            assert rig.query(names) == (False, False)
            assert rig.get(names, [21, 22]) == (False, False)
        rig.look()
        assert rig.meter.noted[-1].failing
        store.down = False


def test_a_flush_removes_the_namespace_by_its_keys() -> None:
    store = StandIn(values={"other/aa": b"x"})
    with storing(MooncakeBackend(store=store)) as rig:
        rig.put(["a" * 16], [1])
        assert rig.workers.clear() == ""
    assert set(store.values) == {"other/aa"}


def test_without_the_package_or_a_library_of_it_the_setting_is_refused() -> None:
    code = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from tokenspeed.errors import SettingsError\n"
        "from tokenspeed.settings.model import StorageSettings\n"
        "from tokenspeed.storage.mooncake import open_mooncake\n"
        "try: open_mooncake(StorageSettings())\n"
        "except SettingsError as fault: print(fault)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "storage.backend: mooncake cannot be loaded" in run.stdout
    assert "libibverbs1" in run.stdout


def _why_not() -> str:
    """Why no store of Mooncake's own can be run here, or ""."""
    if importlib.util.find_spec("mooncake") is None:
        return "the extra `mooncake` is not installed"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as fault:
        return f"mooncake cannot be loaded: {fault}"
    return ""


WHY_NOT = _why_not()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """Address of a master on loopback."""
    port = free_port()
    package = importlib.util.find_spec("mooncake")
    assert package is not None
    assert package.submodule_search_locations is not None
    command = [
        str(Path(package.submodule_search_locations[0]) / "mooncake_master"),
        f"--rpc_port={port}",
        f"--metrics_port={free_port()}",
        "--rpc_address=127.0.0.1",
    ]
    with (tmp_path / "master.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_pages_travel_through_a_store_of_mooncakes_own_and_outlive_their_engine(master: str) -> None:
    settings = StorageSettings(backend=StorageKind.MOONCAKE, mooncake_master=master, max_gib=0.25)
    until_there = range(50)
    keeper = None
    for _ in until_there:  # the master may still be starting
        try:
            keeper = open_mooncake(settings)
            break
        except SettingsError:
            continue
    assert keeper is not None
    # What the first engine stores lies in the keeper's memory or its own; the keeper's stays.
    with storing(open_mooncake(settings)) as rig:
        rig.fill(1, 7)
        assert rig.put(["a" * 16], [1]) == (True,)
        assert rig.get(["a" * 16, "b" * 16], [2, 3]) == (True, False)
        assert (rig.content(2), rig.content(3)) == ({7}, {0})
        assert rig.query(["a" * 16, "b" * 16]) == (True, False)
    memory = np.zeros(8 << 20, dtype=np.uint8)
    keeper.attach(memory)
    key, frame = sealed(3)
    memory[: len(frame)] = frame
    assert keeper.put([key], [memory[: len(frame)]]) == [True]
    other = open_mooncake(settings)
    room = np.zeros(8 << 20, dtype=np.uint8)
    other.attach(room)
    into = room[: len(frame)]
    assert other.get([key], [into]) == [True]
    assert intact(key, into)
    other.clear("aa")
    assert other.exists([key]) == [False]
    other.close()
    keeper.close()
