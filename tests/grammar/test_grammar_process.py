"""The compiler's own process: limits of time and memory, death, and coming back."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tokenspeed.grammar.backend import GrammarRefused
from tokenspeed.grammar.child import WHOLE
from tokenspeed.grammar.limits import GrammarLimits
from tokenspeed.grammar.process import COMMAND, CompileProcess
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource

BYTES = Vocabulary(tokens=(*(bytes([one]) for one in range(256)), b""), stops=(256,))
PATIENT = GrammarLimits(compile_s=120.0)


def regex(text: str) -> GrammarSource:
    return GrammarSource(kind="regex", text=text)


@pytest.fixture(scope="module")
def process() -> Iterator[CompileProcess]:
    made = CompileProcess(limits=PATIENT)
    yield made
    made.close()


def number_of(process: CompileProcess) -> int:
    assert process.state.process is not None
    return process.state.process.pid


def test_one_process_tries_one_grammar_after_another_and_says_why_not(process: CompileProcess) -> None:
    process.attempt(regex("a+"), BYTES)
    first = number_of(process)
    with pytest.raises(GrammarRefused) as refusal:
        process.attempt(regex("(a"), BYTES)
    assert str(refusal.value)
    process.attempt(GrammarSource(kind="json_schema", text='{"type": "object"}'), BYTES)
    assert number_of(process) == first


def test_a_process_that_was_killed_is_replaced_by_the_next_attempt(process: CompileProcess) -> None:
    process.attempt(regex("a"), BYTES)
    before = number_of(process)
    process.kill()
    process.attempt(regex("b"), BYTES)
    assert number_of(process) != before


def test_a_compilation_over_its_time_is_stopped_and_refused_with_the_limit(process: CompileProcess) -> None:
    process.attempt(regex("a"), BYTES)
    short = attrs.evolve(process, limits=attrs.evolve(PATIENT, compile_s=1e-6))
    dice = random.Random(0)
    slow = "|".join("".join(dice.choices("abcdefgh", k=10)) for _ in range(20_000))  # seconds: who asks looks before
    with pytest.raises(GrammarRefused, match=r"longer than 1e-06 s \(grammar\.compile_s\)"):
        short.attempt(regex(slow), BYTES)
    assert process.state.process is None


def test_a_process_that_dies_in_the_middle_refuses_its_grammar_and_names_the_memory(process: CompileProcess) -> None:
    process.attempt(regex("a"), BYTES)
    assert process.state.process is not None
    process.state.process.kill()
    process.state.process.wait()
    state = process.state
    # what `start` would replace is still taken for alive if it dies just behind that look
    with pytest.raises(GrammarRefused, match=r"grammar\.memory_mib"):
        Dying(limits=PATIENT, state=state).attempt(regex("a"), BYTES)


@attrs.frozen(kw_only=True, eq=False)
class Dying(CompileProcess):
    """Its process is not looked at before it is asked."""

    def start(self) -> None:
        return None


def heavy_of(process: CompileProcess) -> bool:
    assert process.state.process is not None
    return "libtorch" in Path(f"/proc/{process.state.process.pid}/maps").read_text(encoding="utf-8")


def test_the_process_does_without_torch(process: CompileProcess) -> None:
    process.prepare(BYTES)
    assert not heavy_of(process)


@pytest.mark.slow
def test_the_process_works_with_torch_where_a_name_alone_does_not_do() -> None:
    whole = Whole(limits=PATIENT)
    try:
        whole.attempt(regex("[a-z]{3}"), BYTES)
        with pytest.raises(GrammarRefused):
            whole.attempt(regex("["), BYTES)
        assert heavy_of(whole)
    finally:
        whole.close()


@attrs.frozen(kw_only=True, eq=False)
class Whole(CompileProcess):
    """As after a library that did not make do with names."""

    command: tuple[str, ...] = (*COMMAND, WHOLE)


@pytest.mark.parametrize(
    ("body", "works"),
    [
        ("import torch\nfrom torch import Tensor\ndef f(x: torch.Tensor = torch.tensor(-1)) -> Tensor: ...", True),
        ("import torch.nn.functional", False),
        ("import torch\ntorch.__version__.split('.')", False),
    ],
)
def test_a_library_that_needs_more_than_names_says_so_when_it_is_imported(
    tmp_path: Path, body: str, works: bool
) -> None:
    (tmp_path / "user.py").write_text(body)
    job = "import sys; from tokenspeed.grammar.light_import import import_without;"
    job += " import_without(('torch',), ('tokenspeed.version', 'user')); print('in')"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    made = subprocess.run(
        [sys.executable, "-c", job], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (made.returncode == 0, made.stdout) == (works, "in\n" if works else "")


def test_a_closed_one_refuses_and_leaves_no_process() -> None:
    made = CompileProcess(limits=PATIENT)
    made.start()
    child = made.state.process
    assert child is not None
    made.close()
    assert child.poll() is not None
    with pytest.raises(GrammarRefused, match="closed"):
        made.attempt(regex("a"), BYTES)
