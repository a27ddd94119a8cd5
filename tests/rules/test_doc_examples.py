"""What the documents show can be run: code, commands, routes and fields exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from source_tree import ROOT

from tokenspeed.cli.main import COMMANDS, parse
from tokenspeed.frontend.http.app import ROUTES
from tokenspeed.frontend.http.schema import ChatRequest, CompletionRequest
from tokenspeed.settings.keys import keys, sections
from tokenspeed.settings.load import load_text
from tokenspeed.settings.model import Settings

DOCS = tuple(sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_in_documents_parses_and_imports_what_exists(path: Path) -> None:
    for block in blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tokenspeed"):
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_yaml_in_documents_loads(path: Path) -> None:
    for block in blocks(path, "yaml"):
        load_text(block)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_in_documents_are_understood(path: Path) -> None:
    for block in blocks(path, ""):
        for line in block.splitlines():
            words = (
                shlex.split(line, comments=True) if line.startswith(("tokenspeed ", ".venv/bin/tokenspeed ")) else []
            )
            if words:
                assert parse(words[1:]).command in COMMANDS


def test_the_api_document_lists_every_route() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    plain = {re.sub(r"\{model:path\}", "{model}", spec.path) for spec in ROUTES}
    unversioned = {path for path in plain if path not in ("/v1/tokenize", "/v1/detokenize")}
    assert [path for path in sorted(unversioned) if f" {path}`" not in text] == []


def test_every_field_the_api_document_names_exists() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = text[text.index("Fields of generation") :].split("\n\n")[0]
    fields = {f.encode_name for struct in (ChatRequest, CompletionRequest) for f in msgspec.structs.fields(struct)}
    assert [name for name in re.findall(r"`(\w+)`", listed) if name not in fields] == []


def test_every_key_a_document_names_exists() -> None:
    known = {key.dotted for key in keys(Settings)}
    names = "|".join(path[0] for path, _ in sections(Settings))
    for path in DOCS:
        named = re.findall(rf"`((?:{names})\.[a-z_]+)(?::[^`]*)?`", path.read_text(encoding="utf-8"))
        others = {"device.md", "cache.md"}
        assert [name for name in named if name not in known | others] == [], path.name


def test_every_config_is_in_the_document_of_settings() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "configs").glob("*.yaml") if f"(../configs/{p.name})" not in text] == []
