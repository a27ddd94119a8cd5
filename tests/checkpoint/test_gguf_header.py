"""The GGUF header reader, against files of the format's own library and against damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import write_gguf

from tokenspeed.checkpoint.gguf_header import open_gguf
from tokenspeed.errors import ModelError


def test_metadata_and_tensors_are_those_the_library_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors = {"a.weight": rng.random((3, 64), np.float32), "b.bias": rng.random(7).astype(np.float16)}
    path = write_gguf(tmp_path / "m.gguf", metadata={"x.list": [1.5, 2.5], "x.name": "naïve 😀"}, tensors=tensors)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            expected = field.contents()
            assert ours.metadata[key] == (tuple(expected) if isinstance(expected, list) else expected)
    assert len(ours.metadata) == len(theirs.fields) - 3
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.offset, entry.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.data(tensor.name).tobytes() == tensor.data.tobytes()
    assert ours.tensors["b.bias"].type_name == "F16"


def test_quantized_tensors_have_the_size_of_their_blocks(tmp_path: Path) -> None:
    blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entry = open_gguf(path).tensors["w"]
    assert (entry.shape, entry.type_name, entry.nbytes) == ((4, 64), "Q8_0", 4 * 2 * 34)


def test_data_are_a_view_that_cannot_be_written(tmp_path: Path) -> None:
    view = open_gguf(write_gguf(tmp_path / "m.gguf")).data("token_embd.weight")
    assert not view.flags.writeable


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read"),
        (b"GGM", "starts with b'GGM'"),
        (b"PK\x03\x04" + b"\0" * 40, "starts with"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + b"\0" * 40, "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99) + b"\0" * 40, "value type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 40) + b"\0" * 40, "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + b"\0" * 40, "element type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQQ", 3, 0, 1, 1, b"k", 9, 8, 1, 1 << 50) + b"\0" * 40, "past the end"),
    ],
)
def test_a_file_that_is_no_gguf_is_refused_with_the_reason(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=says) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        open_gguf(tmp_path / "none.gguf")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(0, 1400, 7), len(whole) - 40, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            open_gguf(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 1200), value=st.integers(0, 255), wide=st.booleans())
def test_a_damaged_byte_gives_a_model_error_or_a_readable_file(
    tmp_path: Path, place: int, value: int, wide: bool
) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    whole[place : place + (8 if wide else 1)] = bytes([value]) * (8 if wide else 1)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    try:
        opened = open_gguf(path)
    except ModelError:
        return
    for key in opened.metadata:
        assert opened.metadata[key] is not None
    for name in opened.tensors:
        assert opened.data(name).nbytes == opened.tensors[name].nbytes


@pytest.mark.parametrize(
    ("replaced", "by", "says"),
    [
        (struct.pack("<IQQIQ", 2, 64, 5, 0, 0), struct.pack("<IQQIQ", 9, 64, 5, 0, 0), "9 dimensions"),
        (struct.pack("<IQQIQ", 2, 64, 5, 0, 0), struct.pack("<IQQIQ", 2, 64, 0, 0, 0), "row length"),
        (struct.pack("<IQQIQ", 2, 64, 5, 0, 0), struct.pack("<IQQIQ", 2, 64, 1 << 60, 0, 0), "truncated"),
        (struct.pack("<IQQIQ", 2, 64, 5, 0, 0), struct.pack("<IQQIQ", 2, 64, 5, 777, 0), "ggml type 777"),
        (struct.pack("<IQQIQ", 2, 64, 5, 0, 0), struct.pack("<IQQIQ", 2, 64, 5, 0, 5), "offset 5"),
        (struct.pack("<IQQIQ", 2, 64, 5, 0, 0), struct.pack("<IQQIQ", 2, 65, 5, 8, 0), "multiples of 32"),
    ],
)
def test_an_impossible_tensor_is_refused_by_name(tmp_path: Path, replaced: bytes, by: bytes, says: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    assert content.count(replaced) == 1
    path.write_bytes(content.replace(replaced, by))
    with pytest.raises(ModelError, match=says) as caught:
        open_gguf(path)
    assert "token_embd.weight" in str(caught.value)


def test_an_alignment_that_is_no_alignment_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"general.alignment": 12})
    with pytest.raises(ModelError, match=r"general\.alignment is 12"):
        open_gguf(path)
