"""What the documents name exists: routes, fields, keys, files."""

from __future__ import annotations

import re

import msgspec
from source_tree import ROOT, SRC

from tokenspeed.frontend.http.app import ROUTES
from tokenspeed.frontend.http.schema import ChatRequest, CompletionRequest
from tokenspeed.settings.flags import FLAGS
from tokenspeed.settings.keys import keys, sections
from tokenspeed.settings.model import Settings

DOCS = tuple(sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]))


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


OTHERS = {
    "--no-deps",
    "--extra-index-url",
    "--index-url",
    "--health-check-interval-secs",
    "--worker-urls",
    "--enable-rl",
}
"""Options of pip and of the SMG gateway."""


def test_every_option_a_document_names_exists() -> None:
    parsers = [*(SRC / "cli").glob("*.py"), *(p for d in ("tools", "benchmarks") for p in (ROOT / d).rglob("*.py"))]
    sources = "".join(path.read_text(encoding="utf-8") for path in (*parsers, ROOT / "tests" / "conftest.py"))
    known = {name for flag in FLAGS for name in flag.names} | set(re.findall(r'"(--[a-z][\w-]*)"', sources)) | OTHERS
    for path in DOCS:
        plain = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        spans = " ".join(re.findall(r"`([^`]+)`", plain))
        assert set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", spans)) - known == set(), path.name


def test_the_index_names_every_document() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in sorted(names) if f"({name})" not in text] == []
