"""Frames that are taken for a page and those that are not; what has a namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import numpy as np
import pytest
from storage_rig import facts

from tokenspeed.storage.frame import HEADER_BYTES, frame_bytes, intact, page_of, seal
from tokenspeed.storage.identity import GroupSchema, namespace_of, schema_of, weights_over

KEY = "aa/0102"


def sealed(page: bytes, key: str = KEY) -> np.ndarray:
    frame = np.zeros(frame_bytes(len(page)), dtype=np.uint8)
    page_of(frame)[:] = np.frombuffer(page, dtype=np.uint8)
    seal(key, frame)
    return frame


def test_a_sealed_page_is_intact_under_its_own_key_only() -> None:
    frame = sealed(bytes(range(200)))
    assert intact(KEY, frame)
    assert page_of(frame).tobytes() == bytes(range(200))
    assert not intact("aa/0103", frame)
    assert not intact("ab/0102", frame)


def test_one_changed_bit_anywhere_that_counts_is_seen() -> None:
    whole = sealed(bytes(range(100)))
    for at in (*range(32), *range(HEADER_BYTES, len(whole))):
        frame = whole.copy()
        frame[at] ^= 1 << (at % 8)
        assert not intact(KEY, frame), at


@pytest.mark.parametrize("kept", [0, 1, 32, HEADER_BYTES, 120])
def test_a_frame_of_which_only_the_beginning_was_written_is_no_page(kept: int) -> None:
    frame = sealed(b"\x07" * 100)
    frame[kept:] = 0
    assert not intact(KEY, frame)


@pytest.mark.contract("CT-26")
def test_the_same_facts_give_the_same_namespace_in_another_process() -> None:
    code = (
        "from storage_rig import facts; from tokenspeed.storage.identity import namespace_of, schema_of;"
        "print(namespace_of(schema_of(facts()), 'w'))"
    )
    path = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        timeout=60,
    )
    assert run.stdout.strip() == namespace_of(schema_of(facts()), "w")


@pytest.mark.contract("CT-26")
def test_whatever_a_pages_bytes_depend_on_gives_another_namespace() -> None:
    (full, window) = facts().groups
    changed = [
        facts(model="other"),
        facts(numerics="avx512"),
        facts(dtype="bfloat16"),
        facts(page_tokens=8),
        facts(rank=1),
        facts(ranks=2),
        facts(tenant="other"),
        facts(groups=(full,)),
        facts(groups=(window, full)),
        *(
            facts(groups=(attrs.evolve(full, **{field.name: "x" if field.type == "str" else 999}), window))
            for field in attrs.fields(GroupSchema)
        ),
    ]
    schemas = [schema_of(facts()), *map(schema_of, changed)]
    assert len(set(schemas)) == len(schemas)
    assert namespace_of(schemas[0], "w") != namespace_of(schemas[0], "v")


def test_the_same_tensors_over_the_same_weights_are_the_same_weights() -> None:
    assert weights_over("w", (b"a", b"b")) == weights_over("w", (b"a", b"b"))
    assert (
        len({weights_over("w", (b"a", b"b")), weights_over("v", (b"a", b"b")), weights_over("w", (b"ab",)), "w"}) == 4
    )
