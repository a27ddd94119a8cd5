"""The folder as a store: what is whole, what is torn, who shares it, and what makes room."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from files_writer import sealed
from storage_rig import storing

from tokenspeed.errors import SettingsError
from tokenspeed.plane.storage import StorageBackend
from tokenspeed.storage.files import FileBackend, open_files
from tokenspeed.storage.files_limit import LEFT_BEHIND_S, SizeLimit
from tokenspeed.storage.frame import intact
from tokenspeed.testing.storage import MemoryStore

GIB = 1 << 30
WRITER = Path(__file__).parents[1] / "support" / "files_writer.py"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileBackend]:
    backend = open_files(tmp_path / "store", max_bytes=GIB)
    yield backend
    backend.close()


def stores(files: FileBackend) -> tuple[StorageBackend, ...]:
    return (files, MemoryStore())


def page_files(backend: FileBackend) -> list[Path]:
    return sorted(path for path in backend.folder.glob("*/*/*") if not path.name.startswith("."))


def test_the_folder_and_the_double_keep_the_same_promises(files: FileBackend) -> None:
    for store in stores(files):
        (first, frame), (second, other) = sealed(1), sealed(2)
        assert store.put([first], [frame]) == [True]
        assert store.put([first, second], [frame, other]) == [True, True]
        assert store.exists([first, "aa/00", second]) == [True, False, True]
        into = [np.zeros_like(frame) for _ in range(3)]
        assert store.get([second, "aa/00", first], into) == [True, False, True]
        assert (into[0].tobytes(), into[2].tobytes()) == (other.tobytes(), frame.tobytes())
        assert store.get([first], [np.zeros(len(frame) - 1, dtype=np.uint8)]) == [False]
        assert store.get([first], [np.zeros(len(frame) + 1, dtype=np.uint8)]) == [False]
        store.delete([first, "aa/00"])
        assert store.exists([first, second]) == [False, True]
        store.clear("bb")
        assert store.exists([second]) == [True]
        store.clear("aa")
        store.clear("aa")
        assert store.exists([second]) == [False]
        assert store.put([second], [other]) == [True]


def test_a_page_is_written_once_and_a_second_writer_only_renews_its_time(files: FileBackend) -> None:
    key, frame = sealed(1)
    files.put([key], [frame])
    (path,) = page_files(files)
    os.utime(path, (1000, 1000))
    inode = path.stat().st_ino
    files.put([key], [frame])
    assert path.stat().st_ino == inode
    assert path.stat().st_mtime > 1e9
    os.utime(path, (1000, 1000))
    files.get([key], [np.zeros_like(frame)])
    assert path.stat().st_mtime > 1e9


@pytest.mark.parametrize("how", ["truncated", "changed", "emptied", "a folder", "swapped"])
def test_a_damaged_file_is_a_miss_is_deleted_and_is_stored_again(tmp_path: Path, how: str) -> None:
    backend = open_files(tmp_path, max_bytes=GIB)
    with storing(backend) as rig:
        names = ["a" * 16, "b" * 16]
        rig.fill(1, 1)
        rig.fill(2, 2)
        assert rig.put(names, [1, 2]) == (True, True)
        first, second = page_files(backend)
        if how == "truncated":
            os.truncate(second, 100)
        elif how == "changed":
            second.write_bytes(second.read_bytes()[:-1] + b"x")
        elif how == "emptied":
            os.truncate(second, 0)
        elif how == "a folder":
            second.unlink()
            second.mkdir()
        else:
            second.write_bytes(first.read_bytes())
        assert rig.get(names, [11, 12]) == (True, False)
        assert (rig.content(11), rig.content(12)) == ({1}, {0})
        if how in ("changed", "swapped"):
            assert not second.exists()
            assert rig.put(names, [1, 2]) == (True, True)
            assert rig.get(names, [11, 12]) == (True, True)
            assert rig.content(12) == {2}


def test_a_folder_that_disappears_costs_hits_and_comes_back_with_the_next_page(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with storing(open_files(folder, max_bytes=GIB)) as rig:
        rig.put(["a" * 16], [1])
        folder.rename(tmp_path / "gone")
        assert rig.query(["a" * 16]) == (False,)
        assert rig.get(["a" * 16], [11]) == (False,)
        assert rig.put(["a" * 16], [1]) == (True,)
        assert rig.query(["a" * 16]) == (True,)


def test_a_full_disk_stores_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path; from files_writer import sealed;"
        "from tokenspeed.storage.files import open_files\n"
        "backend = open_files(Path(sys.argv[1]), max_bytes=1 << 30)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "key, frame = sealed(1)\n"
        "try: backend.put([key], [frame])\n"
        "except OSError as fault: print('OSError', fault.errno)\n"
        "print(backend.exists([key]))\n"
        "backend.close()\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environ, timeout=60, check=True
    )
    assert run.stdout.split("\n")[0].startswith("OSError")
    assert "[False]" in run.stdout
    assert [path for path in tmp_path.glob("*/*/*") if path.is_file()] == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_several_processes_share_a_folder_and_one_that_is_killed_leaves_no_page_torn(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    backend = open_files(tmp_path, max_bytes=GIB)
    writers = [
        subprocess.Popen([sys.executable, str(WRITER), str(tmp_path), str(seed)], stdout=subprocess.PIPE, env=environ)
        for seed in (0, 20)
    ]
    try:
        frame = sealed(0)[1]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.read(1) == b"."
        found = 0
        for turn in range(150):
            key = sealed(turn % 40)[0]
            if backend.get([key], [frame])[0]:
                assert intact(key, frame)
                found += 1
            if turn in (50, 100):
                writers[turn == 100].send_signal(signal.SIGKILL)
        assert found
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    for number in range(40):
        key = sealed(number)[0]
        if backend.get([key], [frame])[0]:
            assert intact(key, frame)
    # What they were writing is no page, and goes when it is old.
    left = [path for path in tmp_path.glob("*/*/.*") if path.is_file()]
    for path in left:
        old = path.stat().st_mtime - 2 * LEFT_BEHIND_S
        os.utime(path, (old, old))
    backend.limit.make_room()
    assert [path for path in left if path.exists()] == []
    backend.close()


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    backend = FileBackend(folder=tmp_path, limit=SizeLimit(folder=tmp_path, max_bytes=GIB))
    keys, frame = [], sealed(0)[1]
    for number in range(10):
        key, frame = sealed(number)
        keys.append(key)
        backend.put([key], [frame])
    for path in page_files(backend):
        os.utime(path, (1000, 1000 + int(path.name, 16)))
    backend.get([keys[0]], [frame])
    room = SizeLimit(folder=tmp_path, max_bytes=7 * len(frame))
    assert room.make_room() <= 7 * len(frame)
    # A little more room than is needed, so that not every page written makes some.
    assert backend.exists(keys) == [True] + [False] * 4 + [True] * 5
    assert room.make_room() <= 7 * len(frame)


def test_the_size_is_kept_by_a_thread_while_pages_are_written(tmp_path: Path) -> None:
    size = len(sealed(0)[1])
    backend = open_files(tmp_path, max_bytes=4 * size)
    for number in range(12):
        key, frame = sealed(number)
        backend.put([key], [frame])
    # Closing waits for the thread; what it had not looked at yet is looked at here.
    backend.close()
    assert SizeLimit(folder=tmp_path, max_bytes=4 * size).make_room() <= 4 * size
    assert 0 < len(page_files(backend)) <= 4


def test_two_engines_do_not_look_at_the_same_time(tmp_path: Path) -> None:
    backend = FileBackend(folder=tmp_path, limit=SizeLimit(folder=tmp_path, max_bytes=1))
    key, frame = sealed(1)
    backend.put([key], [frame])
    other = SizeLimit(folder=tmp_path, max_bytes=1)
    with other._alone() as alone:
        assert alone
        assert backend.limit.make_room() == 0
        assert backend.exists([key]) == [True]
    backend.limit.make_room()
    assert backend.exists([key]) == [False]


def test_a_folder_that_cannot_be_written_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SettingsError, match=r"storage\.path: .*file/store cannot be written"):
        open_files(tmp_path / "file" / "store", max_bytes=GIB)
