"""Weights broadcast by another process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ops_rig import HandRank, greedy, hand_rank, oracle, random_tensors, weights_folder

from tokenspeed.plane.operations import CloseGroupOp, GroupWeights, OpenGroupOp, UpdateWeightsOp, WeightsGroup

TRAINER = Path(__file__).parents[1] / "support" / "trainer_process.py"
PROMPT = list(range(1, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights_folder(tmp_path_factory.mktemp("trained"), random_tensors(7))


@contextmanager
def trainer(name: str, folder: str, *, count: int) -> Iterator[int]:
    """The port of the trainer's store; the process has ended afterwards."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(TRAINER), str(port), name, f"{folder}/model.safetensors", str(count)]
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def source_of(name: str) -> GroupWeights:
    tensors = dict(sorted(random_tensors(7).items()))
    return GroupWeights(
        group=name,
        names=tuple(tensors),
        dtypes=("float32",) * len(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )


def joined(rank: HandRank, port: int, name: str, timeout_s: float = 60.0) -> object:
    group = WeightsGroup(name=name, address=f"127.0.0.1:{port}", rank=1, size=2, timeout_s=timeout_s)
    return rank.call(OpenGroupOp, group=group)


def test_weights_come_from_a_trainer_in_another_process_and_its_death_leaves_the_old_ones(folder: str) -> None:
    wanted = oracle("random:tiny-llama@7", [PROMPT])
    with hand_rank() as rank:
        before = rank.run(greedy("a", PROMPT))
        with trainer("g", folder, count=-1) as port:
            assert joined(rank, port, "g").success
            assert not joined(rank, port, "g").success  # the name is taken
            assert rank.call(UpdateWeightsOp, source=source_of("g"), version="v7").success
            assert rank.call(CloseGroupOp, name="g").success
        assert rank.run(greedy("b", PROMPT)) == wanted != before
        assert rank.versions("b") == {"v7"}
        assert not rank.call(CloseGroupOp, name="g").success
        with trainer("h", folder, count=3) as port:
            assert joined(rank, port, "h").success
            reply = rank.call(UpdateWeightsOp, source=source_of("h"))
            assert not reply.success
            assert "not received from group 'h'" in reply.message
        assert rank.run(greedy("c", PROMPT)) == wanted


def test_a_group_that_nobody_else_joins_and_one_that_is_not_there_are_told_in_words() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with hand_rank() as rank:
        reply = joined(rank, port, "alone", timeout_s=0.5)
        assert not reply.success
        assert "group 'alone'" in reply.message
        missing = rank.call(UpdateWeightsOp, source=source_of("nobody"))
        assert not missing.success
        assert "there is no such group" in missing.message
        assert len(rank.run(greedy("a", PROMPT))[0]) == 8


@pytest.mark.parametrize("dtype", ["int64", "nonsense"])
def test_a_dtype_that_weights_do_not_have_is_refused_by_name(dtype: str) -> None:
    source = GroupWeights(group="g", names=("model.norm.weight",), dtypes=(dtype,), shapes=((64,),))
    with hand_rank() as rank:
        reply = rank.call(UpdateWeightsOp, source=source)
        assert not reply.success
