"""Rules of the tests, the documents and the automation themselves."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from source_tree import ROOT, SRC, imported, modules, tree

TESTS = modules(ROOT / "tests")
DOCS = tuple(sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]))
SECRET_WORDS = (
    "issue" + " #",
    "issue " + "2",
    "Cla" + "ude",
    "/wo" + "rk/",
    "the " + "reference design",
    "this " + "session",
    "Anthr" + "opic",
)
"""Words about how the project is made; written in pieces so that this file does not contain them."""


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


PATCHING = ("monkeypatch.setattr", "monkeypatch.delattr", "monkeypatch.setitem", "mocker.patch", "time.sleep")


def test_no_test_patches_attributes_or_sleeps() -> None:
    found = []
    for path in TESTS:
        found += [f"{path.name}: {name}" for name in imported(tree(path)) if "mock" in name.split(".")]
        attributes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)]
        found += [f"{path.name}:{node.lineno}" for node in attributes if ast.unparse(node) in PATCHING]
    assert found == []


def test_test_files_have_names_of_their_own_and_test_names_are_sentences() -> None:
    files = [path.name for path in TESTS if path.name != "conftest.py"]
    assert sorted(name for name in files if files.count(name) > 1) == []
    functions = [(p, n) for p in TESTS for n in ast.walk(tree(p)) if isinstance(n, ast.FunctionDef)]
    short = [f"{p.name}: {n.name}" for p, n in functions if n.name.startswith("test_") and n.name.count("_") < 3]
    assert short == []


def test_no_file_speaks_of_how_the_project_is_made() -> None:
    found = []
    for path in tracked():
        if path.suffix in (".gguf", ".png", ".npz", ".bin", ".safetensors", ".gz"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in SECRET_WORDS if word.lower() in text.lower()]
    assert found == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith(("http://", "https://", "mailto:"))]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_a_document_names_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {a or b for a, b in named} - targets == set()


def test_the_readme_begins_with_the_two_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:60])
    for command in ("make serve", "make test", "curl", "pip install", "tokenspeed-py"):
        assert command in first_screen


@pytest.mark.contract("ER-8", "ER-9")
def test_the_test_configuration_turns_waits_and_late_compilations_into_errors() -> None:
    for name in ("TOKENSPEED_DATA_PLANE_SYNC_DEBUG", "TOKENSPEED_JIT_COMPILE_CHECK"):
        assert os.environ[name] == "error"
        for file in ("Makefile", ".ci/run"):
            assert re.search(rf"export {name}\s*:?=\s*error", (ROOT / file).read_text(encoding="utf-8")), file


@pytest.mark.contract("ER-1", "ER-11")
def test_the_document_of_extension_names_checks_that_exist() -> None:
    text = (ROOT / "docs" / "components.md").read_text(encoding="utf-8")
    section = text[text.index("## The five principles") :].split("\n## ")[0]
    principles = re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]
    assert len(principles) == 5
    defined = {n.name for path in TESTS for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)}
    for principle in principles:
        named = re.findall(r"`(test_\w+)`", principle)
        assert named, f"no check named: {principle[:60]}"
        assert [name for name in named if name not in defined] == []


def test_files_stay_readable() -> None:
    long = {str(p.relative_to(SRC)): len(p.read_text().splitlines()) for p in modules()}
    assert {name: count for name, count in long.items() if count > 450} == {}


def test_the_diagrams_are_what_their_script_draws() -> None:
    folder = ROOT / "docs" / "diagrams"
    drawn = runpy.run_path(str(folder / "draw.py"))["DIAGRAMS"]
    assert {path.name for path in folder.glob("*.svg")} == set(drawn)
    assert [name for name, draw in drawn.items() if draw() != (folder / name).read_text(encoding="utf-8")] == []
